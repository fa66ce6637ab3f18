"""Retrieval over long sequences: equal models, windows that are short, accuracy by position."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.studies.long_recall import (
    BINS,
    NAMES,
    WINDOW_FRACTION,
    experiment,
    long_mixers,
    main,
    mean_by_range,
)
from bench.studies.recall import AssociativeRecall
from train.scaling.design import count_without_embeddings
from transformer import BigBirdConfig, SlidingWindowConfig


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


def test_windows_are_a_sixteenth_of_the_sequence() -> None:
    found = long_mixers(4096)
    window, bigbird = found["sliding_window"], found["bigbird"]
    assert isinstance(window, SlidingWindowConfig)
    assert window.window == 4096 // WINDOW_FRACTION
    assert isinstance(bigbird, BigBirdConfig)
    assert bigbird.random_block_span == 4096
    assert set(NAMES) <= set(found)


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


@pytest.mark.nightly
def test_study_continues_from_short_sequences(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "names": ("linear",),
        "length": 256,
        "pairs": 4,
        "short_steps": 2,
    }
    folders: dict[str, Any] = {"workdir": tmp_path / "runs", "output": tmp_path / "results"}
    main(**settings, **folders, steps=2)
    data = json.loads((tmp_path / "results" / "long_recall.json").read_text())
    assert {len(each) for each in data["accuracy_by_range"].values()} == {BINS}
    [first] = (tmp_path / "runs" / "short").glob("mixer=linear,seed=0,*")
    log = (tmp_path / "runs" / "long" / "mixer=linear,seed=0" / "logbook.jsonl").read_text()
    assert f'"source": "{first}"' in log
    # What is recorded is not trained again, though the folders are gone.
    again: dict[str, Any] = {"workdir": tmp_path / "again", "output": tmp_path / "results"}
    main(**settings, **again, steps=2)
    assert not [*(tmp_path / "again").glob("*/mixer=*")]
