"""Scripts with user-defined parts run, and the command line reads their runs."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import train
from tests.train.support import command
from train.config import plugins
from train.config.experiment_files import find_experiment
from train.config.plugins import import_modules
from train.tasks.registry import TASKS
from transformer.attention.mixer import MIXERS
from transformer.testing import check_mixer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Leave no part registered, and JAX with its default configuration."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):
        yield
    MIXERS.pop("moving_average", None)
    TASKS.pop("MostFrequent", None)
    for name in ("own_mixer", "own_task"):
        sys.modules.pop(f"experiment_{name}", None)
    plugins._imported.clear()
    plugins._file_of_module.clear()


@pytest.mark.full
def test_own_task(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "own_task.py")
    experiment = dataclasses.replace(find_experiment(file), steps=300)
    run = train.fit(experiment, "runs/frequent", quiet=True)
    assert run.final_metrics["accuracy"] > 0.8
    assert run.generate(["4 1 1 1 0 1 1 2 1 1 3 1 1 0 1"]) == ["1"]
    result = command(capsys, "evaluate", "runs/frequent", "--import", file, "--json")
    assert json.loads(result.output)["accuracy"] == pytest.approx(run.final_metrics["accuracy"])


@pytest.mark.full
def test_own_mixer(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "own_mixer.py")
    import_modules([file], "--import")
    check_mixer("moving_average", d_model=6, length=17, lengths=(1, 17, 23))
    experiment = dataclasses.replace(find_experiment(file), steps=12)
    train.fit(experiment, "runs/average", quiet=True)
    line = ("sample", "runs/average", "--import", file, "--prompt", "def", "--max-new-tokens", "5")
    result = command(capsys, *line, "--json")
    assert len(json.loads(result.output)["text"][0]) == 5
