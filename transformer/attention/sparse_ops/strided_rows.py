"""Attention among the tokens of a row at the same index modulo a stride.

The row is reshaped into `stride` rows of every `stride`-th token, which have no gaps: a dilated
window (Beltagy et al. 2020, section 3.1) is an ordinary window in them, and the column component of
a strided pattern (Child et al. 2019, equation 3) is all of a row. So the blockwise kernel skips
what the pattern hides, and any stride costs O(T) for the same number of keys.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from transformer.attention.backends.blockwise import DEFAULT_BLOCK_SIZE, attend_blockwise
from transformer.attention.backends.partial import PartialAttention
from transformer.attention.masks import Mask
from transformer.attention.reference import ScoreSpec


def attend_strided_rows(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    mask: Mask,  # within a row of every d-th token; its arrays are [B or 1, T]
    score_spec: ScoreSpec,
    stride: int,  # d
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> PartialAttention:
    """Attend to visible keys at distances 0, d, 2 d, ... of the query, by index.

    The positions of the mask count the tokens of a row of every d-th token. Its segments must be
    given, as they hide the tokens that fill up the last row.
    """
    if stride == 1:
        return attend_blockwise(q, k, v, mask, score_spec, block_size=block_size)
    batch, length = q.shape[:2]

    def split(x: Shaped[Array, "#B T ..."]) -> Shaped[Array, "B_times_d T_over_d ..."]:
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, -length % stride)
        x = jnp.pad(jnp.broadcast_to(x, (batch, *x.shape[1:])), padding)
        x = x.reshape(batch, -1, stride, *x.shape[2:]).swapaxes(1, 2)
        return x.reshape(batch * stride, -1, *x.shape[3:])

    def join(x: Shaped[Array, "B_times_d T_over_d ..."]) -> Shaped[Array, "B T ..."]:
        x = x.reshape(batch, stride, *x.shape[1:]).swapaxes(1, 2)
        return x.reshape(batch, -1, *x.shape[3:])[:, :length]

    dropout_rngs = score_spec.dropout_rngs
    if dropout_rngs is not None:  # each of the d rows of an example needs a key of its own
        dropout_rngs = jax.vmap(lambda key: jax.random.split(key, stride))(dropout_rngs).reshape(-1)
    y, lse = attend_blockwise(
        split(q),
        split(k),
        split(v),
        jax.tree.map(split, mask),
        score_spec._replace(dropout_rngs=dropout_rngs),
        block_size=block_size,
    )
    return PartialAttention(join(y), join(lse.swapaxes(1, 2)).swapaxes(1, 2))
