"""Retrieval over long sequences: equal models, windows that are short, accuracy by position."""

import numpy as np

from bench.studies.long_recall import (
    BINS,
    experiment,
    mean_by_range,
)
from bench.studies.recall import AssociativeRecall
from train.scaling.design import count_without_embeddings


def test_accuracy_is_a_mean_over_questions() -> None:
    asked = np.ones((2, 4 * BINS))
    asked[:, :6] = 0  # all of the first range, and half of the second
    correct = np.zeros_like(asked, bool)
    correct[0, :8] = True
    correct[:, -4:] = True
    found = mean_by_range(correct, asked)
    assert found.shape == (BINS,)
    assert found[:3].tolist() == [0.0, 0.5, 0.0]
    assert found[-1] == 1.0


def test_models_are_equally_large() -> None:
    made = {
        name: experiment(name, length=4096, pairs=16, steps=10, seed=0)
        for name in ("full", "bigbird", "linear", "convolution", "elman")
    }
    sizes = {name: count_without_embeddings(each.model) for name, each in made.items()}
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes
    for each in made.values():
        assert each.sequence_length == 4096
        assert isinstance(each.task, AssociativeRecall)
        assert each.task.train_examples == each.steps  # no sequence is seen twice
