"""The names of a run's classes or tags, by number.

A run that was trained: its model, weights and tokenizer, read from its folder.

A run read from its folder, with the weights that it is judged by.

The model's vocabulary is the tokenizer's, and its classes are those of the data.

Every task by its settings.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from train.errors import UserError
from train.experiment import Experiment
from train.run_folder.folder import RunFolder, explain_read_errors, read_json
from train.run_folder.regular_files import MAX_VOCABULARY_BYTES

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer
from typing import TYPE_CHECKING

from train.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer
    from train.experiment import Experiment

    pass  # DROPPED
    from train.tasks.config import Classification, Tagging
from train.tasks.config import Classification, Tagging

if TYPE_CHECKING:
    from train.experiment import Experiment

Labels = tuple[str, ...]


def read_labels(folder: RunFolder) -> Labels:
    """The names of a run's classes or tags; none of a run that has no such."""
    with explain_read_errors(folder.labels):
        try:
            folder.labels.stat()  # not `exists`, which takes a loop of links for no file
        except FileNotFoundError:
            return ()
    names = read_json(folder.labels, MAX_VOCABULARY_BYTES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder.labels}: is no list of names; put the file back as it was")
    return tuple(names)


def resolve_vocab_size(experiment: Experiment, tokenizer: Tokenizer) -> Experiment:
    """The experiment with the tokenizer's number of words, where it left that open.

    Raises UserError if it says another.
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
    """The experiment with the number of classes, where it left that open.

    Raises UserError if it says another.
    """
    if task.num_labels not in (0, len(labels)):
        raise UserError(
            f"task.num_labels {task.num_labels}: the data have {len(labels)} ({', '.join(labels)}); "
            "leave it out"
        )
    task = dataclasses.replace(task, num_labels=len(labels))
    return dataclasses.replace(experiment, task=task)


def check_vocab_size(experiment: Experiment, tokenizer: Tokenizer, source: str) -> None:
    """Raises UserError if the model has another vocabulary than the tokenizer."""
    if experiment.model.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{source}: has {tokenizer.vocab_size} tokens and the model "
            f"{experiment.model.vocab_size}; give the tokenizer that the model was trained with, "
            "or set model.vocab_size to 0 and train anew"
        )
    encoder = experiment.model.encoder
    if encoder is not None and encoder.vocab_size not in (0, tokenizer.vocab_size):
        raise UserError(
            f"model.encoder.vocab_size {encoder.vocab_size}: {source} has {tokenizer.vocab_size} "
            f"tokens, for both languages; give {tokenizer.vocab_size} for a table of the source's "
            "own, or 0 to share the target's"
        )
