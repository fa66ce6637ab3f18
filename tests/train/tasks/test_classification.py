""" """

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.support import light_compiler as light_compiler
from tests.train.tasks.support import tiny_tagger
from train.data.token_labels import TokenLabelSplit
from train.errors import UserError
from train.tasks.base import Metric
from train.tasks.classification import TaggingTask, span_f1
from train.tasks.config import Tagging


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaggingTask:
    return TaggingTask(tiny_tagger(tmp_path_factory.mktemp("tagging")))


def test_span_tags_use_f1_and_other_tags_accuracy(task: TaggingTask) -> None:
    assert task.selection_metric(task.prepare_corpus()) == Metric("f1", lower_is_better=False)
    words: Any = type("Corpus", (), {"labels": ("NOUN", "VERB")})
    assert task.selection_metric(words) == Metric("accuracy", lower_is_better=False)


def some_answers(split: TokenLabelSplit, seed: int) -> dict[int, np.ndarray]:
    drawn = np.random.default_rng(seed)
    rows = range(len(split.sentence_indices))
    return {row: drawn.integers(0, len(split.labels), len(split.tokens[row])) for row in rows}


def test_f1_of_part_of_a_split(task: TaggingTask) -> None:
    split = task.prepare_corpus().split("validation")
    given = some_answers(split, 0)
    whole = span_f1(split, given)
    right = {row: np.where(split.targets[row] < 0, 0, split.targets[row]) for row in given}
    assert span_f1(split, right) == 1.0
    assert 0 < whole < 1
    some = {row: answer for row, answer in right.items() if row % 3}
    assert span_f1(split, some) == 1.0
    mixed = {**given, **{row: right[row] for row in list(right)[:5]}}
    assert span_f1(split, {row: mixed[row] for row in list(right)[:5]}) == 1.0
    assert span_f1(split, mixed) > whole


def test_num_labels_must_match_the_data(tmp_path: Path) -> None:
    wrong = TaggingTask(dataclasses.replace(tiny_tagger(tmp_path), task=Tagging(9)))
    with pytest.raises(
        UserError, match=r"task\.num_labels 9: the data have 3 \(B-ANIMAL, I-ANIMAL, O"
    ):
        wrong.resolve_experiment(wrong.prepare_corpus())
