"""Where batches lie: rows over devices, and the tokens of each row too if there is a context axis.

Under a causal mask the first tokens of a sequence see few others and the last see all. So its
tokens are cut into twice as many pieces as there are parts, and part i takes pieces i and
2 C - 1 - i of the 2 C: all parts have as much to do (Grattafiori et al. 2024, section 3.3.2). What
a token is told of its place is its `positions` alone, and losses are sums: the order of the tokens
matters to neither.

Whether the tokens of an experiment's sequences can be spread over devices.
"""

import jax
import numpy as np
from jax.sharding import Mesh

from train.errors import UsageError
from train.experiment import Experiment
from train.parallel.sharding import logical_to_sharding, num_shards
from transformer.attention.config import AttentionConfig
from transformer.hardware import Hardware
from transformer.parameter_counts import LayerMixer

HostBatch = dict[str, np.ndarray]
"""Arrays with the batch in front: [B] of examples, [B, T] of tokens."""


def num_batch_shards(mesh: Mesh) -> int:
    """How many parts the rows of a batch are cut into."""
    return num_shards(mesh, "batch")


def shard_batch(mesh: Mesh, rows: HostBatch, batch_size: int) -> dict[str, jax.Array]:
    """This host's rows of a batch -> the whole batch, spread over the devices of all hosts."""
    rows = zigzag_reorder(rows, num_shards(mesh, "length"))

    def place(array: np.ndarray) -> jax.Array:
        names = ("batch", "length")[: array.ndim] + (None,) * (array.ndim - 2)
        sharding = logical_to_sharding(mesh, names)
        shape = (batch_size, *array.shape[1:])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return {name: place(array) for name, array in rows.items()}


def zigzag_reorder(rows: HostBatch, context_shards: int) -> HostBatch:
    """Tokens in the order in which `context_shards` parts take them, each its early and its late piece."""
    if context_shards == 1:
        return rows

    def ordered(array: np.ndarray) -> np.ndarray:
        if array.ndim < 2:
            return array
        cut = array.reshape(len(array), 2 * context_shards, -1, *array.shape[2:])
        order = [
            piece
            for part in range(context_shards)
            for piece in (part, 2 * context_shards - 1 - part)
        ]
        return cut[:, order].reshape(array.shape)

    return {name: ordered(array) for name, array in rows.items()}


def check_batch_divides(mesh: Mesh, field_name: str, rows: int, grad_accum_steps: int) -> None:
    """Raises UsageError if batches to train on cannot be cut for the devices of a mesh."""
    shards, hosts = num_batch_shards(mesh), jax.process_count()
    if shards % hosts:
        raise UsageError(
            f"mesh data x fsdp x expert {shards}: does not divide among {hosts} hosts, each of "
            "which reads whole rows; give a multiple of it, and less to tensor or context"
        )
    if rows % (shards * grad_accum_steps):
        raise UsageError(
            f"{field_name} {rows}: does not divide among {shards * grad_accum_steps} "
            "(mesh.data x mesh.fsdp x mesh.expert x grad_accum_steps); give a multiple of it"
        )


def check_context_parallelism(experiment: Experiment, mesh: Mesh, hardware: Hardware) -> None:
    """Raises UsageError, or a ValueError of the attention itself, for what cannot be spread.

    A mixer sees the tokens of its device alone: only full attention has a way to reach the others.
    """
    count, model = num_shards(mesh, "length"), experiment.model
    if count == 1:
        return
    if not experiment.data.is_text:
        raise UsageError(
            f"mesh.context {count}: task {type(experiment.task).__name__} has sequences of several "
            "lengths; only windows of text can be spread: set it to 1"
        )
    length = experiment.sequence_length
    if length % (2 * count):
        raise UsageError(
            f"data.sequence_length {length}: does not divide into {2 * count} pieces, two for each "
            f"part of mesh.context {count}; give a multiple of {2 * count}"
        )
    for place, block in enumerate(model.layer_pattern):
        mixer = LayerMixer(block.mixer, model.causal)
        spread = mixer.backend_choice(
            model, length, hardware=hardware, segments=experiment.has_segments, context_shards=count
        )
        if spread is None:
            raise UsageError(
                f"mesh.context {count}: model.layer_pattern.{place}.mixer is {block.mixer.kind}, "
                "which cannot look at tokens on other devices; set mesh.context to 1, or the mixer to "
                f"{AttentionConfig.kind}"
            )
