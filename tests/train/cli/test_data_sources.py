"""Data sources as flags: as many sources as the flags number."""

import json
from pathlib import Path

import pytest

from tests.train.support import command, write_config
from train.cli.config_verbs import with_listed_sources
from train.config.experiment_files import find_experiment
from train.experiment import Experiment


def test_flags_define_sources_instead_of_a_path() -> None:
    experiment = find_experiment("quickstart")
    changed = with_listed_sources(experiment, {"data.sources.2.weight": "3"})
    assert len(changed.text_data.sources) == 3
    assert changed.text_data.path == ""
    assert with_listed_sources(experiment, {"data.sourcesx.2.weight": "3"}) == experiment
    assert isinstance(with_listed_sources(changed, {"data.sources.1.path": "x"}), Experiment)


def test_data_verb_shows_splits_and_windows_of_every_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        lines = [json.dumps({"text": f"{name} {n} " * 20}) for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    shown = command(
        capsys, "data", write_config(tmp_path), "--json", "--data.tokenizer.kind", "byte",
        "--data.sources.0.path", str(tmp_path / "one.jsonl"), "--data.sources.0.weight", "3",
        "--data.sources.1.path", str(tmp_path / "two.jsonl"),
    )  # fmt: skip
    assert shown.status == 0, shown.error
    summary = json.loads(shown.output)
    assert list(summary["splits"]) == [
        "train/one", "train/two", "validation/one", "validation/two",
    ]  # fmt: skip
    assert summary["splits"]["train/one"]["documents"] == 18
    assert "one 0.75" in summary["training_data"]
    assert all("one" in each["text"] or "two" in each["text"] for each in summary["examples"])
