"""Sizes that the data decide: the vocabulary of the tokenizer, and the labels of the data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from train.errors import UserError
from train.run_folder.folder import RunFolder, read_json

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer
    from train.experiment import Experiment
    from train.run import Run
    from train.tasks.task_configs import Classification, Tagging

Labels = tuple[str, ...]
"""Names of labels or tags by index."""


def read_labels(folder: RunFolder) -> Labels:
    """Return the labels saved with a run; empty for a task without labels."""
    if not folder.labels.exists():
        return ()
    names = read_json(folder.labels)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder.labels}: is not a list of names; restore the original file")
    return tuple(names)


def read_tokenizer(folder: RunFolder, experiment: Experiment) -> Tokenizer | None:
    """Return the tokenizer saved with a run; None for data without text."""
    from train.data.tokenizer import Tokenizer

    return None if experiment.data.tokenizer is None else Tokenizer.load(folder.tokenizer)


def tokenizer_of(run: Run) -> Tokenizer:
    """Return the tokenizer of a run whose data are text."""
    assert run.tokenizer is not None
    return run.tokenizer


def resolve_vocab_size(experiment: Experiment, tokenizer: Tokenizer) -> Experiment:
    """Return the experiment with `model.vocab_size` set to the tokenizer's size if it was 0.

    Raises UserError if it was set to another size.
    """
    model = experiment.model
    if not model.vocab_size:
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
        experiment = dataclasses.replace(experiment, model=model)
    check_vocab_size(experiment, tokenizer, "data.tokenizer")
    return experiment


def resolve_num_labels(
    experiment: Experiment, task: Classification | Tagging, labels: Labels
) -> Experiment:
    """Return the experiment with `task.num_labels` set to the number of labels if it was 0.

    Raises UserError if it was set to another number.
    """
    if task.num_labels not in (0, len(labels)):
        raise UserError(
            f"task.num_labels {task.num_labels}: the data have {len(labels)} "
            f"({', '.join(labels)}); leave it out"
        )
    task = dataclasses.replace(task, num_labels=len(labels))
    return dataclasses.replace(experiment, task=task)


def check_vocab_size(
    experiment: Experiment, tokenizer: Tokenizer, source: str, *, padded: bool = False
) -> None:
    """Raise UserError if the model's vocabulary is not the tokenizer's, read from `source`.

    With `padded` the model may have more rows than the tokenizer has tokens, as many published
    models do.
    """
    rows, tokens = experiment.model.vocab_size, tokenizer.vocab_size
    if tokens > rows or (tokens < rows and not padded):
        raise UserError(
            f"{source}: has {tokenizer.vocab_size} tokens and the model "
            f"{experiment.model.vocab_size}; give the tokenizer that the model was trained "
            "with, or set model.vocab_size to 0 and train again"
        )
    encoder = experiment.model.encoder
    own_rows = encoder.vocab_size if encoder is not None else 0
    if own_rows and (tokens > own_rows or (tokens < own_rows and not padded)):
        raise UserError(
            f"model.encoder.vocab_size {own_rows}: {source} has {tokenizer.vocab_size} "
            f"tokens, for both languages; give {tokenizer.vocab_size} for a table of the source's "
            "own, or 0 to share the target's"
        )
