"""Checks of batches against a mesh, and the order of tokens that are split (context parallelism).

Under a causal mask the first tokens of a sequence attend to few keys and the last ones to all. For
equal work on all C context shards, a row is cut into 2 C pieces and shard i takes pieces i and
2 C - 1 - i (zigzag order; Grattafiori et al. 2024, section 3.3.2). The order of the tokens in
memory does not affect their results: a token's place is given by `positions` alone, and losses are
sums. Other models keep the order: their work is even, and experts with a capacity depend on it.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from train.data.data_config import DataConfig
from train.data.token_file import HostBatch
from train.errors import UsageError
from train.parallel.sharding import num_shards
from transformer.attention.full import AttentionConfig
from transformer.attention.mixer import MixerConfig
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.hardware import Hardware
from transformer.models.config import TransformerConfig
from transformer.parameter_counts import LayerMixer


def check_batch_divides(mesh: Mesh, field: str, rows: int, grad_accum_steps: int) -> None:
    """Raise UsageError if training batches cannot be split over the devices of a mesh.

    Args:
      mesh: The devices.
      field: Name of the setting of the rows, for the message.
      rows: Number that the rows of every batch are a multiple of.
      grad_accum_steps: Microbatches of a batch.
    """
    shards, hosts = num_shards(mesh, "batch"), jax.process_count()
    # A host reads rows, not parts of rows: two hosts that shared one would both read all of it, and
    # the global batch would have it twice.
    if shards % hosts:
        raise UsageError(
            f"mesh data x fsdp x expert {shards}: does not divide among {hosts} hosts, each of "
            "which reads whole rows; give a multiple of it, and less to tensor or context"
        )
    if rows % (shards * grad_accum_steps):
        raise UsageError(
            f"{field} {rows}: does not divide among {shards * grad_accum_steps} "
            "(mesh.data x mesh.fsdp x mesh.expert x grad_accum_steps); give a multiple of it"
        )


def check_context_parallelism(
    model: TransformerConfig, data: DataConfig, mesh: Mesh, hardware: Hardware
) -> None:
    """Check that sequences can be split over the context axis of a mesh.

    Raises:
      UsageError: The data, the sequence length or a mixer does not support it.
      ValueError: An attention backend that was asked for by name does not.
    """
    shards, length = num_shards(mesh, "length"), data.longest_example
    if shards == 1:
        return
    # Batches of several lengths would compile a program for each length, and few of these divide.
    if not data.is_text:
        raise UsageError(
            f"mesh.context {shards}: {type(data).__name__} has sequences of several lengths; only "
            "windows of text can be split: set it to 1"
        )
    # Zigzag order: an early piece and a late one for each shard.
    if length % (2 * shards):
        raise UsageError(
            f"data.sequence_length {length}: does not divide into {2 * shards} pieces, two for "
            f"each shard of mesh.context {shards}; give a multiple of {2 * shards}"
        )
    for index, block in enumerate(model.layer_pattern):
        # Other mixers see the tokens of their own device only.
        choice = LayerMixer(_without_window(block.mixer), model.causal).backend_choice(
            model,
            length,
            hardware=hardware,
            segments=data.has_segments,
            context_shards=shards,
        )
        if choice is None:
            raise UsageError(
                f"mesh.context {shards}: model.layer_pattern.{index}.mixer is {block.mixer.kind}, "
                "which cannot attend to tokens on other devices; set mesh.context to 1, or the "
                f"mixer to {AttentionConfig.kind}"
            )


def _without_window(mixer: MixerConfig) -> MixerConfig:
    """Return a sliding window as full attention, which needs the same of an attention backend."""
    if not isinstance(mixer, SlidingWindowConfig):
        return mixer
    names = {field.name for field in dataclasses.fields(mixer)} - {"window", "dilation"}
    return AttentionConfig(**{name: getattr(mixer, name) for name in names})


def zigzag_reorder(rows: HostBatch, context_shards: int) -> HostBatch:
    """Return the rows with their tokens in zigzag order, for `context_shards` shards.

    With 2 shards and pieces 0 1 2 3 of each row, the order is 0 3 | 1 2.
    """
    num_pieces = 2 * context_shards
    order = [piece for shard in range(context_shards) for piece in (shard, num_pieces - 1 - shard)]

    def reorder(array: np.ndarray) -> np.ndarray:
        if array.ndim < 2:  # a number for each example has no tokens
            return array
        # On the host, before the transfer: on the devices it would be a collective in every step.
        pieces = array.reshape(len(array), num_pieces, -1, *array.shape[2:])
        return pieces[:, order].reshape(array.shape)

    return {name: reorder(array) for name, array in rows.items()}
