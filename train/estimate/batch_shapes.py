"""What an experiment leaves for its data to say, as far as it can be known beforehand.

Products that an optimizer makes of its own: those of Muon, once a step whatever the batch.

What of an experiment the estimates are made from, counted once for all candidates.
"""

import dataclasses
from typing import TYPE_CHECKING

from train.errors import UserError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from train.experiment import Experiment
from train.experiment import Experiment


def max_batch_shape(experiment: "Experiment") -> tuple[int, int]:
    """The examples of a batch, and the tokens of each: the most that there may be."""
    data = experiment.data
    length = data.longest_example
    if data.batch_tokens:
        room = min(data.batch_tokens // length, experiment.batch_size or data.batch_tokens)
        return max(1, room // data.batch_size_multiple) * data.batch_size_multiple, length
    return experiment.batch_size, length


def sharded_batch_shapes(
    experiment: "Experiment", mesh: "Mesh"
) -> "dict[str, jax.ShapeDtypeStruct]":
    """What a step is given, by shapes, laid over a mesh.

    Raises UsageError if the mesh cannot cut it.
    """
    import jax

    from train.parallel.sharding import logical_to_sharding

    def laid(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = logical_to_sharding(mesh, ("batch", "length")[: leaf.ndim], leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    rows, _ = max_batch_shape(experiment)
    return {name: laid(leaf) for name, leaf in unsharded_batch_shapes(experiment, rows).items()}


def unsharded_batch_shapes(
    experiment: "Experiment", rows: int
) -> "dict[str, jax.ShapeDtypeStruct]":
    """Return the shapes and dtypes of the arrays of a batch of `rows` rows, by name."""
    from train.tasks.registry import make_task

    return make_task(experiment).batch_shapes(rows, max_batch_shape(experiment)[1])


def resolve_sizes(experiment: "Experiment") -> tuple["Experiment", tuple[str, ...]]:
    """The experiment with its V and its number of classes, and what was assumed to know them."""
    tokenizer, task = experiment.data.tokenizer, experiment.task
    counts_labels = task.predicts_labels and not task.num_labels
    if counts_labels or (not experiment.model.vocab_size and tokenizer.kind == "character"):
        return _read(experiment), ()
    if experiment.model.vocab_size:
        return experiment, ()
    if tokenizer.kind in ("byte", "file"):
        from train.data.tokenizer_training import train_tokenizer

        return _of(experiment, train_tokenizer(tokenizer, ()).vocab_size), ()
    most = tokenizer.vocab_size
    note = f"the {tokenizer.kind} tokenizer is taken to learn all of its {most:,} tokens"
    return _of(experiment, most), (note,)


def _of(experiment: "Experiment", words: int) -> "Experiment":
    model = dataclasses.replace(experiment.model, vocab_size=words)
    return dataclasses.replace(experiment, model=model)


def _read(experiment: "Experiment") -> "Experiment":
    """As the data make it: they are read."""
    from train.tasks.registry import make_task

    try:
        task = make_task(experiment)
        return task.resolve_experiment(task.prepare_corpus())
    except UserError as error:
        known = "--task.num-labels and " if experiment.task.predicts_labels else ""
        raise UserError(
            f"{error}; or give {known}--model.vocab-size, and no text is needed"
        ) from error
