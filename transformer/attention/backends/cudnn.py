"""cuDNN's flash attention on NVIDIA GPUs (Dao et al. 2022): memory linear in T.

The softmax is computed in float32 inside the kernel. It supports causal and full masks without
segments, and no dropout; `choose.py` lists what else it needs.
"""

import jax

from transformer.attention.backends.merge import repeat_kv_for_shards
from transformer.attention.masks import MaskPattern
from transformer.context import ActivationConstraint, unconstrained


def attend_cudnn(
    q: jax.Array,  # [B, T, N, H] bfloat16 or float16
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H]
    pattern: MaskPattern,
    scale: float,
    constrain: ActivationConstraint = unconstrained,
) -> jax.Array:  # [B, T, N, H]
    """Return softmax(scale q k^T under the pattern) v."""
    k, v = (_shard_like_queries(each, constrain) for each in (k, v))
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=pattern.causal,
        implementation="cudnn",
    )


def _shard_like_queries(
    x: jax.Array,  # [B, S, K, H]
    constrain: ActivationConstraint,
) -> jax.Array:  # [B, S, K or more, H]
    """Split key or value heads over the devices of the query heads.

    The kernel's partitioning rule requires the same split of queries, keys and values.
    """
    repeated = repeat_kv_for_shards(x, constrain.num_shards("heads"))
    return x if repeated is x else constrain(repeated, ("batch", None, "heads", None))
