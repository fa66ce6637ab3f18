"""The benchmark of long-range tasks: its table, and one variant trained end to end."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.long_range import PUBLISHED, SMALL, Options, Outcome, chosen, guesses, table, trained
from tests.train.support import light_compiler as light_compiler
from train.data.example_configs import ListOpsDataConfig
from train.data.listops import prepare_listops
from transformer.mixer_registry import MIXERS

DATA = ListOpsDataConfig(
    train_examples=40,
    validation_examples=5,
    test_examples=20,
    min_length=8,
    max_length=40,
    max_buckets=1,
)


@pytest.mark.parametrize("name", ["listops", "byte_text"])
def test_table_has_every_variant_and_the_published_results(name: Any) -> None:
    outcome = Outcome(accuracy=12.34, loss=1.5, steps_per_second=6.25, memory=3 * 2**20)
    outcomes = dict.fromkeys(SMALL[name], outcome)
    guessed = {"most frequent": 17.5}
    grid = table(Options(task=name), outcomes, guessed)
    rows = list(zip(*(column.cells for column in grid.columns), strict=True))
    published = {"listops": ("36.37", "33.67"), "byte_text": ("64.27", "61.20")}[name]
    assert rows[0] == ("full", "12.3", "1.500", "6.25", "3", published[0])
    assert ("Sinkhorn", "", "", "", "", published[1]) in rows
    assert rows[-1] == ("most frequent", "17.5", "", "", "", "")
    assert len(rows) == 11 + 2 + 1
    assert set(PUBLISHED) - set(MIXERS) == {"Sinkhorn", "Synthesizer"}


def test_unknown_names_raise() -> None:
    assert list(chosen(Options(variants=("linear", "full")))) == ["linear", "full"]
    with pytest.raises(SystemExit, match="variant arena_full: is not known; give some of full, "):
        chosen(Options(variants=("arena_full",)))
    with pytest.raises(SystemExit, match="--steps 1: the first is not timed; give 2 or more"):
        chosen(Options(steps=1))


def test_guessing_baselines_by_hand(tmp_path: Path) -> None:
    """Training has 1 six times; after MIN it has 2 twice and 1 once, after MAX 9 twice."""
    rows = ["[MIN 2 3 ]\t2", "[MIN 2 4 ]\t2", "[MIN 1 4 ]\t1", "[MAX 9 4 ]\t9", "[MAX 9 3 ]\t9"]
    train, test = tmp_path / "train.tsv", tmp_path / "test.tsv"
    train.write_text("\n".join(["Source\tTarget", *rows, *["1\t1"] * 5]))
    rows = ["[MIN 5 2 ]\t2", "[MIN 1 2 ]\t1", "[MAX 9 1 ]\t9", "[MAX 1 1 ]\t1", "1\t1"]
    test.write_text("\n".join(["Source\tTarget", *rows]))
    paths: Any = {"path": str(train), "validation_path": str(test), "test_path": str(test)}
    corpus = prepare_listops(dataclasses.replace(DATA, **paths))
    assert guesses(corpus) == {"most frequent": 60.0, "by the first token": 60.0}
    test.write_text("\n".join(["Source\tTarget", *rows[:3]]))
    actual = guesses(prepare_listops(dataclasses.replace(DATA, **paths)))
    assert actual == pytest.approx({"most frequent": 100 / 3, "by the first token": 200 / 3})


@pytest.mark.nightly
def test_one_variant_end_to_end() -> None:
    [experiment] = chosen(Options(variants=("linear",), steps=3)).values()
    experiment = dataclasses.replace(experiment, data=DATA)
    corpus = prepare_listops(DATA)
    outcome = trained(experiment, corpus)
    right = outcome.accuracy * 20 / 100
    assert right == pytest.approx(round(right))
    assert np.isfinite(outcome.loss)
    assert outcome.steps_per_second > 0
    assert outcome.memory > 0
