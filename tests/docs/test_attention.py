"""`docs/attention.md` agrees with what the mixers declare."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import command, lines_of, losses, write_config
from train.config import plugins
from transformer import MIXERS
from transformer.testing.contract import check_mixer
from transformer.testing.mixer_under_test import default_config

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
COLUMNS = ("causal", "cached", "segments", "cross", "any length")


def rows(heading: str) -> dict[str, dict[str, str]]:
    """Return the rows of the first table with this heading in its first column, by that column."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    cut = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    count = next(i for i, line in enumerate(lines[start:]) if not line.startswith("|"))
    titles, _, *body = cut[:count]
    return {row[0].strip("`"): dict(zip(titles, row, strict=True)) for row in body}


KINDS = rows("kind")


def test_table_lists_every_mixer() -> None:
    own = ("transformer.attention.full", "transformer.attention.variants")
    assert set(KINDS) == {name for name, each in MIXERS.items() if each.__module__.startswith(own)}


def test_table_has_declared_abilities() -> None:
    for kind, row in KINDS.items():
        config = default_config(kind)
        abilities: Any = MIXERS[kind].abilities(config)
        said = {title.replace(" ", "_"): row[title] != "–" for title in COLUMNS}
        declared = dataclasses.asdict(abilities)
        assert said == {name: declared[name] for name in said}, kind
        assert (row["segments"] == "by index") == config.depends_on_row_index, kind


(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Return a function that undoes the import of the example."""

    def forget() -> None:
        MIXERS.pop("sharp", None)
        sys.modules.pop("experiment_sharp", None)
        plugins._imported.clear()
        plugins._file_of_module.clear()

    monkeypatch.setattr(sys, "path", sys.path[:])
    forget()
    yield forget
    forget()


@pytest.mark.full
def test_example_mixer_passes_its_check(tmp_path: Path, forget: Callable[[], None]) -> None:
    (tmp_path / "sharp.py").write_text(EXAMPLE)
    plugins.import_modules([str(tmp_path / "sharp.py")], "--import")
    check_mixer("sharp", d_model=16, length=17, lengths=(1, 17, 23))


@pytest.mark.full
def test_example_mixer_is_used_from_the_command_line(
    tmp_path: Path,
    forget: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It trains, resumes, evaluates and samples."""
    (tmp_path / "sharp.py").write_text(EXAMPLE)
    config = write_config(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*line: str) -> str:
        forget()  # as in a new process
        result = command(capsys, *line, "--import", "sharp.py")
        assert (result.status, result.error) == (0, "")
        return result.output

    mixer = "--model.layer-pattern.0.mixer"
    fit = ("fit", config, "--quiet", f"{mixer}.kind", "sharp", f"{mixer}.num-heads", "4")
    run(*fit, "--workdir", "broken", "--steps", "5")
    run(*fit, "--workdir", "broken", "--steps", "8")
    run(*fit, "--workdir", "whole", "--steps", "8")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    saved = json.loads((tmp_path / "whole" / "config.json").read_text())
    [block] = saved["experiment"]["model"]["layer_pattern"]
    expected = {"kind": "sharp", "num_heads": 4, "factor": 2.0}
    assert block["mixer"].items() >= expected.items()
    assert saved["imports"] == [str(tmp_path / "sharp.py")]
    metrics = json.loads(run("evaluate", "whole", "--json"))
    assert metrics["loss"] == pytest.approx(lines_of(tmp_path / "whole/metrics.jsonl")[-1]["loss"])
    sample = ("sample", "whole", "--prompt", "the", "--max-new-tokens", "5", "--temperature", "0")
    [text] = json.loads(run(*sample, "--json"))["text"]
    assert len(text) == 5
    forget()
    refused = command(capsys, *sample)
    assert refused.error.endswith(f"add --import {tmp_path / 'sharp.py'} (in Python, import it)\n")
