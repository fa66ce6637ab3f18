"""Flash attention by cuDNN on NVIDIA GPUs: memory linear in T (Dao et al. 2022)."""

import jax

from transformer.attention.masks import MaskPattern


def attend_cudnn(
    q: jax.Array,  # [B, T, N, H] bfloat16 or float16
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H]
    pattern: MaskPattern,
    *,
    scale: float,
) -> jax.Array:  # [B, T, N, H]
    """Softmax in float32 inside the kernel. Neither dropout nor segments."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=pattern.causal,
        implementation="cudnn",
    )
