"""Causal attention in blocks of queries: each block meets only the keys up to its own end.

Half of the scores of causal attention are masked. In a few blocks (unrolled, each one product of
matrices) most of that half is never computed: (n + 1) / 2n of the full cost for n blocks.
"""

import jax
import jax.numpy as jnp

from transformer.attention.backends.reference import attend_reference
from transformer.attention.masks import Mask
from transformer.attention.score_spec import ScoreSpec
from transformer.layers.dropout import fold_in

MIN_BLOCK_SIZE = 64


def num_query_blocks(length: int) -> int:
    """How many blocks `length` queries are cut into: 4, or fewer where they would be too small."""
    return max(1, min(4, length // MIN_BLOCK_SIZE))


def attend_query_blocks(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # causal and ordered
    score_spec: ScoreSpec,
    sink_logits: jax.Array | None = None,  # [N]
) -> jax.Array:  # [B, T, N, H of values]
    """The same numbers as `attend_reference`; the last block takes what does not divide."""
    dtype = v.dtype
    # All blocks add to the gradients of the keys: as float32, rounded once.
    score_spec, (q, k, v) = score_spec.widen(q, k, v)
    length = q.shape[1]
    blocks = num_query_blocks(length)
    size = length // blocks
    ends = [*range(size, size * blocks, size), length]
    outputs = []
    for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        y, _ = attend_reference(
            q[:, start:end],
            k[:, :end],
            v[:, :end],
            mask.causal_block(start, end, length),
            score_spec._replace(dropout_rngs=fold_in(score_spec.dropout_rngs, index)),
            sink_logits,
        )
        outputs.append(y)
    return jnp.concatenate(outputs, axis=1).astype(dtype)
