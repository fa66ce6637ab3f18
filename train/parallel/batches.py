"""Placement of batches: rows over devices, and the tokens of a row over the context axis.

Under a causal mask the first tokens of a sequence attend to few keys and the last ones to all. For
equal work on all C context shards, a row is cut into 2 C pieces and shard i takes pieces i and
2 C - 1 - i (zigzag order; Grattafiori et al. 2024, section 3.3.2). The order of the tokens in
memory does not affect results: a token's place is given by `positions` alone, and losses are sums.
"""

import jax
import numpy as np
from jax.sharding import Mesh

from train.parallel.sharding import logical_to_sharding, num_shards

HostBatch = dict[str, np.ndarray]
"""One host's rows of a batch: arrays [B] of examples or [B, T] of tokens."""


def num_batch_shards(mesh: Mesh) -> int:
    """Return the number of shards that the rows of a batch are split into."""
    return num_shards(mesh, "batch")


def shard_batch(mesh: Mesh, rows: HostBatch, batch_size: int) -> dict[str, jax.Array]:
    """Return the global batch of `batch_size` rows, of which this host has `rows`."""
    rows = zigzag_reorder(rows, num_shards(mesh, "length"))

    def place(array: np.ndarray) -> jax.Array:
        names = ("batch", "length")[: array.ndim] + (None,) * (array.ndim - 2)
        sharding = logical_to_sharding(mesh, names)
        shape = (batch_size, *array.shape[1:])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return {name: place(array) for name, array in rows.items()}


def zigzag_reorder(rows: HostBatch, context_shards: int) -> HostBatch:
    """Return the rows with their tokens in zigzag order, for `context_shards` shards.

    With 2 shards and pieces 0 1 2 3 of each row, the order is 0 3 | 1 2.
    """
    if context_shards == 1:
        return rows
    num_pieces = 2 * context_shards
    order = [piece for shard in range(context_shards) for piece in (shard, num_pieces - 1 - shard)]

    def reorder(array: np.ndarray) -> np.ndarray:
        if array.ndim < 2:
            return array
        pieces = array.reshape(len(array), num_pieces, -1, *array.shape[2:])
        return pieces[:, order].reshape(array.shape)

    return {name: reorder(array) for name, array in rows.items()}
