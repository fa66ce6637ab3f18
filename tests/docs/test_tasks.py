"""The worked example of docs/tasks.md runs unchanged: a user-defined task without text."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.support import assert_same_bits, command, lines_of, losses
from tests.train.support import light_compiler as light_compiler
from train.config import plugins
from train.run import load
from train.tasks.registry import TASKS

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"

BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
(EXAMPLE,) = (block for block in BLOCKS if "class Regression" in block)

MODULES = {"regression", "experiment_regression"}

SMALL = (
    *("--data.length", "7", "--task.num-examples", "50", "--batch-size", "16", "--quiet"),
    *("--schedule.kind", "constant", "--schedule.warmup-steps", "2", "--log-every", "1"),
    *("--schedule.learning-rate", "0.01"),
)


def forget() -> None:
    TASKS.pop("Regression", None)
    for name in MODULES & set(sys.modules):
        del sys.modules[name]
    plugins._imported.clear()
    plugins._file_of_module.clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the current folder, which contains the example."""
    (tmp_path / "regression.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    forget()
    yield tmp_path
    forget()


@pytest.mark.full
def test_example_trains_evaluates_predicts_and_resumes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*line: str) -> str:
        forget()  # as in a new process
        result = command(capsys, *line)
        assert (result.status, result.error) == (0, "")
        return result.output

    fit = ("fit", "regression.py", *SMALL)
    run(*fit, "--workdir", "broken", "--steps", "12")
    run(*fit, "--workdir", "broken", "--steps", "30")
    run(*fit, "--workdir", "whole", "--steps", "30")
    full, broken = load("whole"), load("broken")
    assert_same_bits(full.params, broken.params)
    assert full.tokenizer is None
    assert not (folder / "whole" / "tokenizer.json").exists()
    curve = losses(folder / "whole")
    assert sum(curve[step] for step in range(26, 31)) < sum(curve[step] for step in range(1, 6)) / 2

    config = json.loads((folder / "whole" / "config.json").read_text())
    assert config["imports"] == [str(folder / "regression.py")]
    assert config["experiment"]["task"] == {"kind": "Regression", "num_examples": 50}
    assert config["experiment"]["data"] == {"kind": "ArrayDataConfig", "path": "", "length": 7}

    forget()
    refused = command(capsys, "evaluate", "whole")
    assert (refused.status, refused.error.count("\n")) == (2, 1)
    assert f"add --import {folder / 'regression.py'} " in refused.error
    own = ("--import", "regression.py", "--json")
    result = {
        split: json.loads(run("evaluate", "whole", "--split", split, *own))["loss"]
        for split in ("train", "validation", "test")
    }
    lines = lines_of(folder / "whole" / "metrics.jsonl")
    assert result["validation"] == pytest.approx(lines[-1]["loss"])
    assert len(set(result.values())) == 3
    [answer] = json.loads(run("sample", "whole", "--prompt", "1 1 1 1 1 1 1", *own))["text"]
    assert 0 < float(answer) < 2
    refused = command(capsys, "sample", "whole", "--prompt", "one", "--import", "regression.py")
    assert refused.error.startswith("error: prompt: could not convert string to float")
    described = json.loads(run("describe", "regression.py", "--json"))
    assert described
