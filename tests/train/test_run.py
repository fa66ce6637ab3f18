"""Runs in a notebook: data from Python, and the methods of a run."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

import train
from tests.train.support import (
    NO_DETECTOR,
    command,
    light_compiler,  # noqa: F401
    shared_programs,  # noqa: F401
    tiny,
)
from train.data import held_data
from train.errors import UsageError, UserError
from train.experiment import Experiment
from train.run import Run

TEXTS = [f"the cat sat on mat {index} and saw {index % 7} red fish" for index in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def make_experiment(folder: Path, steps: int) -> Experiment:
    return tiny(folder, num_layers=1, dropout=0.0, recovery=NO_DETECTOR, steps=steps)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return train.fit(
        make_experiment(folder, steps=4), str(folder / "texts"), data=TEXTS, quiet=True
    )


@pytest.mark.full
def test_run_resumes_only_with_the_same_data(folder: Path, run: Run) -> None:
    del run
    experiment, workdir = make_experiment(folder, steps=6), str(folder / "texts")
    with pytest.raises(UserError, match=f"{workdir}: its run was trained on data given from Pyth"):
        train.fit(experiment, workdir, data=TEXTS[1:], quiet=True)
    with pytest.raises(UserError, match=f"{workdir}: .* and now none are given; call train.fit"):
        train.fit(experiment, workdir, quiet=True)
    with pytest.raises(UserError, match="validation_data: data is not given"):
        train.fit(experiment, workdir, validation_data=TEXTS, quiet=True)
    steps = {line["step"] for line in train.load(workdir).metrics("train")}
    assert train.fit(experiment, workdir, data=TEXTS, quiet=True).step == 6
    assert steps == {1, 2, 3, 4}


@pytest.mark.full
def test_other_process_does_not_have_the_data(
    folder: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_data, "HELD_DATA", {})
    workdir = str(folder / "texts")
    done = command(capsys, "evaluate", workdir)
    assert done.status == 1
    expected = f"{run.experiment.data.path}: names data given from Python, which this process does"
    assert expected in done.error
    assert "train.load(W).evaluate(data=...) takes them" in done.error
    done = command(capsys, "sample", workdir, "--prompt", "the", "--max-new-tokens", "2")
    assert done.status == 0, done.error


@pytest.mark.full
def test_evaluate(folder: Path, run: Run) -> None:
    assert run.evaluate() == pytest.approx(run.final_metrics)
    loaded = train.load(str(folder / "texts"))
    assert loaded.data is None
    actual = loaded.evaluate(data=TEXTS)
    assert actual["loss"] != run.final_metrics["loss"]
    assert actual == loaded.evaluate("train", data={"train": TEXTS, "test": ["x"]})
    with pytest.raises(UserError, match="split 'test': data has only train; choose one"):
        loaded.evaluate("test", data={"train": TEXTS})
    with pytest.raises(UserError, match="data, split train, example 0: is a tuple; give strings"):
        loaded.evaluate(data=[("a", "b")])


@pytest.mark.full
def test_generate(run: Run) -> None:
    one = run.generate("the ", max_new_tokens=3, temperature=0)
    assert isinstance(one, str)
    assert run.generate(["the ", "a "], max_new_tokens=3, temperature=0)[0] == one
    pieces: list[str] = []
    run.generate("the ", max_new_tokens=3, temperature=0, on_text=pieces.append)
    assert "".join(pieces) == one
    with pytest.raises(UsageError, match=r"^temperature -1: give 0"):
        run.generate("the", temperature=-1)


@pytest.mark.full
def test_metrics_and_plot(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = train.load(str(folder / "texts")).metrics()
    assert lines[0]["split"] == "train"
    assert lines[0]["step"] == 1
    assert set(lines[0]) >= {"loss", "learning_rate", "grad_norm"}
    validation = [line for line in run.metrics("validation") if line["step"] == 4]
    assert validation == [{"step": 4, "split": "validation", **run.final_metrics}]
    with pytest.raises(UserError, match=r"^split 'tset': is not known; choose from train, valid"):
        run.metrics("tset")
    with pytest.raises(UserError, match=r"^prompts: one is a NoneType; give strings"):
        run.generate(["text", None])  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"^prompts 3: give a string or a list"):
        run.generate(3)  # type: ignore[arg-type]
    axes = run.plot().axes[0]
    [training] = [line for line in axes.get_lines() if line.get_label() == "training"]
    losses = [line["loss"] for line in run.metrics("train")]
    np.testing.assert_array_equal(training.get_ydata(), losses)

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"plot: needs matplotlib, .*; pip install matplotlib"):
        run.plot()
    monkeypatch.undo()
    empty = dataclasses.replace(run, folder=dataclasses.replace(run.folder, path=folder / "none"))
    with pytest.raises(UserError, match=r"metrics.jsonl: has no losses to plot; train some steps"):
        empty.plot()


@pytest.mark.full
def test_repr_of_a_run(folder: Path, run: Run) -> None:
    loss = f"{run.final_metrics['loss']:.4g}"
    assert repr(run).startswith(f"<Run tiny: LanguageModeling, step 4, loss {loss}, perplexity ")
    assert repr(run).endswith(f"; {folder / 'texts'}>")
