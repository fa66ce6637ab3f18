"""Causal attention in blocks of queries: each block meets only the keys up to its own end.

Half of the scores of causal attention are masked. In a few blocks (unrolled, each one product of
matrices) most of that half is never computed: (n + 1) / 2n of the full cost for n blocks.
"""

import jax
import jax.numpy as jnp

from transformer.attend.reference import attend_reference
from transformer.attend.scoring import Scoring
from transformer.dropout import fold
from transformer.masks import Mask

SMALLEST_BLOCK = 64


def block_count(length: int) -> int:
    """How many blocks `length` queries are cut into: 4, or fewer where they would be too small."""
    return max(1, min(4, length // SMALLEST_BLOCK))


def attend_query_blocks(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # causal and ordered
    scoring: Scoring,
    sinks: jax.Array | None = None,  # [N]
) -> jax.Array:  # [B, T, N, H of values]
    """The same numbers as `attend_reference`; the last block takes what does not divide."""
    dtype = v.dtype
    # All blocks add to the gradients of the keys: as float32, rounded once.
    scoring, (q, k, v) = scoring.widened(q, k, v)
    length = q.shape[1]
    blocks = block_count(length)
    size = length // blocks
    ends = [*range(size, size * blocks, size), length]
    outputs = []
    for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        y, _ = attend_reference(
            q[:, start:end],
            k[:, :end],
            v[:, :end],
            mask.block(start, end, length),
            scoring._replace(dropout_rngs=fold(scoring.dropout_rngs, index)),
            sinks,
        )
        outputs.append(y)
    return jnp.concatenate(outputs, axis=1).astype(dtype)
