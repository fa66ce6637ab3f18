"""Where batches lie: rows over devices, and the tokens of each row too if there is a context axis.

Under a causal mask the first tokens of a sequence see few others and the last see all. So its
tokens are cut into twice as many pieces as there are parts, and part i takes pieces i and
2 C - 1 - i of the 2 C: all parts have as much to do (Grattafiori et al. 2024, section 3.3.2). What
a token is told of its place is its `positions` alone, and losses are sums: the order of the tokens
matters to neither.
"""

import jax
import numpy as np
from jax.sharding import Mesh

from train.errors import UsageError
from train.sharding.rules import partition, parts

Rows = dict[str, np.ndarray]
"""Arrays with the batch in front: [B] of examples, [B, T] of tokens."""


def row_parts(mesh: Mesh) -> int:
    """How many parts the rows of a batch are cut into."""
    return parts(mesh, "batch")


def place_batch(mesh: Mesh, rows: Rows, batch_size: int) -> dict[str, jax.Array]:
    """This host's rows of a batch -> the whole batch, spread over the devices of all hosts."""
    rows = in_turn(rows, parts(mesh, "length"))

    def place(array: np.ndarray) -> jax.Array:
        names = ("batch", "length")[: array.ndim] + (None,) * (array.ndim - 2)
        sharding = partition(mesh, names)
        shape = (batch_size, *array.shape[1:])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return {name: place(array) for name, array in rows.items()}


def in_turn(rows: Rows, count: int) -> Rows:
    """Tokens in the order in which `count` parts take them, each its early and its late piece."""
    if count == 1:
        return rows

    def ordered(array: np.ndarray) -> np.ndarray:
        if array.ndim < 2:
            return array
        cut = array.reshape(len(array), 2 * count, -1, *array.shape[2:])
        order = [piece for part in range(count) for piece in (part, 2 * count - 1 - part)]
        return cut[:, order].reshape(array.shape)

    return {name: ordered(array) for name, array in rows.items()}


def check_batches(mesh: Mesh, setting: str, rows: int, accumulate: int) -> None:
    """Raises UsageError if batches to train on cannot be cut for the devices of a mesh."""
    shards, hosts = row_parts(mesh), jax.process_count()
    if shards % hosts:
        raise UsageError(
            f"mesh data x fsdp x expert {shards}: does not divide among {hosts} hosts, each of "
            "which reads whole rows; give a multiple of it, and less to tensor or context"
        )
    if rows % (shards * accumulate):
        raise UsageError(
            f"{setting} {rows}: does not divide among {shards * accumulate} "
            "(mesh.data x mesh.fsdp x mesh.expert x accumulate); give a multiple of it"
        )
