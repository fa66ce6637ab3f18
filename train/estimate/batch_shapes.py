"""Batch shapes and sizes that an experiment leaves to its data, as far as they are known early."""

import dataclasses

import jax
from jax.sharding import Mesh

from train.assembly import make_task, with_task
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.parallel.sharding import checked_sharding


def max_batch_shape(experiment: Experiment) -> tuple[int, int]:
    """Return the largest batch of an experiment: (examples, tokens per example)."""
    data = experiment.data
    length = data.longest_example
    if data.batch_tokens:
        room = min(data.batch_tokens // length, experiment.batch_size or data.batch_tokens)
        return max(1, room // data.batch_size_multiple) * data.batch_size_multiple, length
    return experiment.batch_size, length


def sharded_batch_shapes(experiment: Experiment, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the fields of a batch as shapes with shardings over a mesh.

    Raises UsageError if the mesh does not divide the batch.
    """

    def with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = ("batch", "length", *[None] * leaf.ndim)
        sharding = checked_sharding(mesh, axes[: leaf.ndim], leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    rows, _ = max_batch_shape(experiment)
    return {
        name: with_sharding(leaf) for name, leaf in unsharded_batch_shapes(experiment, rows).items()
    }


def unsharded_batch_shapes(experiment: Experiment, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the arrays of a batch of `rows` rows, by name."""
    return make_task(experiment).batch_shapes(rows, max_batch_shape(experiment)[1])


def resolve_sizes(experiment: Experiment) -> tuple[Experiment, tuple[str, ...]]:
    """Return the experiment with vocabulary size and number of labels, and the assumptions made.

    Data are read only for character vocabularies, and for labels and features that the config does
    not count.
    """
    tokenizer, task = experiment.data.tokenizer, experiment.task
    num_features = getattr(task, "num_features", None)  # None: the task has no features
    has_features = num_features is not None
    if num_features == 0 or ((task.predicts_labels or has_features) and not task.num_labels):
        return _resolve_from_data(experiment), ()
    if has_features:  # no token is embedded, but a resolved model has a vocabulary
        return _with_vocab_size(experiment, experiment.model.vocab_size or 1), ()
    if tokenizer is None or experiment.model.vocab_size:
        return experiment, ()
    if tokenizer.kind == "character":
        return _resolve_from_data(experiment), ()
    if tokenizer.kind in ("byte", "file"):
        return _with_vocab_size(experiment, train_tokenizer(tokenizer, ()).vocab_size), ()
    vocab_size = tokenizer.vocab_size
    note = f"the {tokenizer.kind} tokenizer is assumed to learn all of its {vocab_size:,} tokens"
    return _with_vocab_size(experiment, vocab_size), (note,)


def _with_vocab_size(experiment: Experiment, vocab_size: int) -> Experiment:
    model = dataclasses.replace(experiment.model, vocab_size=vocab_size)
    return dataclasses.replace(experiment, model=model)


def _resolve_from_data(experiment: Experiment) -> Experiment:
    """Return the experiment with the sizes of its data."""
    try:
        task = make_task(experiment)
        return with_task(experiment, task.resolve(task.prepare_corpus()))
    except UserError as error:
        has_features = hasattr(experiment.task, "num_features")
        given = "--task.num-features" if has_features else "--model.vocab-size"
        if experiment.task.predicts_labels or has_features:
            given = f"--task.num-labels and {given}"
        raise UserError(f"{error}; or give {given}, and no data are needed") from error
