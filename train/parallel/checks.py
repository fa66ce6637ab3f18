"""Checks that an experiment can run on a mesh, made before training starts."""

import jax
from jax.sharding import Mesh

from train.errors import UsageError
from train.experiment import Experiment
from train.parallel.sharding import num_shards
from transformer.attention.config import AttentionConfig
from transformer.hardware import Hardware
from transformer.parameter_counts import LayerMixer


def check_batch_divides(mesh: Mesh, experiment: Experiment) -> None:
    """Raise UsageError if training batches cannot be split over the devices of a mesh."""
    field, rows = experiment.row_multiple
    shards, hosts = num_shards(mesh, "batch"), jax.process_count()
    # A host reads rows, not parts of rows: two hosts that shared one would both read all of it, and
    # the global batch would have it twice.
    if shards % hosts:
        raise UsageError(
            f"mesh data x fsdp x expert {shards}: does not divide among {hosts} hosts, each of "
            "which reads whole rows; give a multiple of it, and less to tensor or context"
        )
    if rows % (shards * experiment.grad_accum_steps):
        raise UsageError(
            f"{field} {rows}: does not divide among {shards * experiment.grad_accum_steps} "
            "(mesh.data x mesh.fsdp x mesh.expert x grad_accum_steps); give a multiple of it"
        )


def check_context_parallelism(experiment: Experiment, mesh: Mesh, hardware: Hardware) -> None:
    """Check that the sequences of an experiment can be split over the context axis of a mesh.

    Raises:
      UsageError: the task, the sequence length or a mixer does not support it.
      ValueError: an attention backend that was asked for by name does not.
    """
    shards, model = num_shards(mesh, "length"), experiment.model
    if shards == 1:
        return
    # Batches of several lengths would compile a program for each length, and few of these divide.
    if not experiment.data.is_text:
        raise UsageError(
            f"mesh.context {shards}: task {type(experiment.task).__name__} has sequences of "
            "several lengths; only windows of text can be split: set it to 1"
        )
    length = experiment.sequence_length
    # Zigzag order: an early piece and a late one for each shard (`train/parallel/sharding.py`).
    if length % (2 * shards):
        raise UsageError(
            f"data.sequence_length {length}: does not divide into {2 * shards} pieces, two for "
            f"each shard of mesh.context {shards}; give a multiple of {2 * shards}"
        )
    for index, block in enumerate(model.layer_pattern):
        # Other mixers see the tokens of their own device only.
        choice = LayerMixer(block.mixer, model.causal).backend_choice(
            model,
            length,
            hardware=hardware,
            segments=experiment.has_segments,
            context_shards=shards,
        )
        if choice is None:
            raise UsageError(
                f"mesh.context {shards}: model.layer_pattern.{index}.mixer is {block.mixer.kind}, "
                "which cannot attend to tokens on other devices; set mesh.context to 1, or the "
                f"mixer to {AttentionConfig.kind}"
            )
