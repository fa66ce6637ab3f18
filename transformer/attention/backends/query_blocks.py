"""Causal attention in blocks of queries, each against the keys up to its own end."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer.attention.backends.partial import widen
from transformer.attention.masks import Mask, positions_or_arange
from transformer.attention.reference import ScoreSpec, attend_reference
from transformer.layers.basic import fold_in

MIN_QUERY_BLOCK = 64
"""Fewest queries of one block of the backend `query_blocks`."""


def num_query_blocks(length: int) -> int:
    """Return the number of blocks for `length` queries: 4, or fewer to keep the minimal size."""
    return max(1, min(4, length // MIN_QUERY_BLOCK))


def attend_query_blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    mask: Mask,  # causal and ordered
    score_spec: ScoreSpec,
    sink_logits: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Compute causal attention in blocks of queries, each against the keys up to its own end.

    Half of the scores of causal attention are masked. With n unrolled blocks, each one matrix
    product, most of that half is never computed: the cost is (n + 1) / 2n of all scores. The
    default on CPUs for inputs that are too short for tiles. The last block takes the remainder.
    """
    dtype = v.dtype
    # Every block adds a term to the gradients of the keys: summed in float32 and rounded once.
    score_spec, (q, k, v) = widen(score_spec, q, k, v)
    length = q.shape[1]
    num_blocks = num_query_blocks(length)
    block_size = length // num_blocks
    # Unrolled in Python: block i has i + 1 parts of the keys, and a loop needs equal shapes.
    ends = [*range(block_size, block_size * num_blocks, block_size), length]
    outputs = []
    for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        y, _ = attend_reference(
            q[:, start:end],
            k[:, :end],
            v[:, :end],
            causal_block(mask, start, end, length),
            score_spec._replace(dropout_rngs=fold_in(score_spec.dropout_rngs, index)),
            sink_logits,
        )
        outputs.append(y)
    return jnp.concatenate(outputs, axis=1).astype(dtype)


def causal_block(mask: Mask, start: int, end: int, length: int) -> Mask:
    """Return the mask of queries [start, end) over keys [0, end), in self-attention."""
    positions = positions_or_arange(mask.positions, length)
    block = mask.replace(
        positions=positions[:, start:end],
        key_positions=positions[:, :end],
        # The last keys are the queries' own, so no row can be empty: a pass over the weights less.
        keys_include_queries=True,
    )
    if mask.allowed is not None:
        block = block.replace(allowed=mask.allowed[:, start:end, :end])
    if mask.segments is None:
        return block
    return block.replace(segments=mask.segments[:, start:end], key_segments=mask.segments[:, :end])
