"""Flash attention on GPUs by JAX's own kernel in Pallas: any float dtype, and packed documents.

For what cuDNN does not serve. It wants lengths that are multiples of its tile, head widths that are
powers of two, and as many heads of keys as of queries: what is missing is padded with zeros, which
change no product, and heads of keys are repeated.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

from transformer.attend.scoring import Scoring
from transformer.masks import Mask

TILE = 64


def attend_pallas_gpu(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    mask: Mask,  # causal or not, segments
    scoring: Scoring,  # products alone
    *,
    interpret: bool = False,
) -> jax.Array:  # [B, T, N, H]
    """The same numbers as `attend_reference`. `interpret` runs the kernel on any hardware."""
    batch, length, heads, width = q.shape
    segments = mask.segments
    if segments is None:
        segments = jnp.ones((1, length), jnp.int32)
    more, wider = -length % TILE, 2 ** max(4, (width - 1).bit_length()) - width
    pad = lambda x: jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, wider)))  # noqa: E731
    k, v = (jnp.repeat(each, heads // each.shape[2], axis=2) for each in (k, v))
    documents = jnp.pad(segments.astype(jnp.int32), ((0, 0), (0, more)))
    sizes = dict.fromkeys(BlockSizes.__dataclass_fields__, TILE)
    y = mha(
        pad(q),
        pad(k),
        pad(v),
        jnp.broadcast_to(documents, (batch, length + more)),
        scoring.scale,
        mask.pattern.causal,
        BlockSizes(**sizes),
        interpret=interpret,
    )[:, :length, :, :width]
    # Padding sees padding in the kernel, so that no row is empty; here it sees nothing.
    return jnp.where((segments != 0)[:, :, None, None], y, 0)
