"""Whole runs on several sources: metrics of each, and exact resume."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import train
from tests.train.resumed_runs import Uninterrupted, fit, preempted_after, state_at
from tests.train.support import NO_DETECTOR, WORDS, assert_same_bits, lines_of, losses, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.checkpoint.manager import CheckpointManager
from train.data.data_config import SourceConfig, StreamingConfig, TextDataConfig, TokenizerConfig
from train.data.streaming import StreamPosition
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment

STEPS = 9


def write_sources(folder: Path) -> tuple[SourceConfig, ...]:
    for name, first in (("prose", 0), ("code", 6)):
        words = WORDS[first : first + 6]
        texts = [" ".join(words[(n * k) % 6] for k in range(20)) for n in range(1, 40)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(lines)
    return tuple(
        SourceConfig(path=str(folder / f"{name}.jsonl"), weight=weight)
        for name, weight in (("prose", 3.0), ("code", 1.0))
    )


def make_experiment(folder: Path, **changes: Any) -> Experiment:
    experiment = tiny(
        folder,
        num_layers=1,
        dropout=0.0,
        recovery=NO_DETECTOR,
        steps=STEPS,
        checkpoint=CheckpointConfig(every=3),
        evaluation=EvaluationConfig(every=6, num_batches=1),
    )
    data = experiment.data
    assert isinstance(data, TextDataConfig)
    data = dataclasses.replace(
        data, path="", sources=write_sources(folder), tokenizer=TokenizerConfig("byte"), **changes
    )
    return dataclasses.replace(experiment, data=data)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    folder = tmp_path_factory.mktemp("mixed")
    workdir = folder / "uninterrupted"
    fit(make_experiment(folder), workdir)
    return Uninterrupted(folder, workdir, losses(workdir))


@pytest.mark.full
def test_metrics_of_each_source_are_logged(uninterrupted: Uninterrupted) -> None:
    lines = lines_of(uninterrupted.workdir / "metrics.jsonl")
    training = [line for line in lines if line["split"] == "train"]
    for line in training:  # shares of the windows until then, eight in each step
        windows = [8 * line["step"] * line[f"share/{name}"] for name in ("prose", "code")]
        assert windows == pytest.approx([round(each) for each in windows], abs=1e-9)
        assert sum(windows) == pytest.approx(8 * line["step"])
    # Nine batches of eight windows are less than one block of the schedule.
    assert training[-1]["share/prose"] == pytest.approx(0.75, abs=0.15)
    for line in (line for line in lines if line["split"] == "validation"):
        assert line["loss"] == pytest.approx(0.75 * line["loss/prose"] + 0.25 * line["loss/code"])
        assert line["loss/prose"] != line["loss/code"]
        assert {"bits_per_byte/prose", "bits_per_byte/code", "bits_per_byte"} <= line.keys()


@pytest.mark.full
def test_resumed_mixture_equals_the_uninterrupted_run(
    uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    experiment = make_experiment(uninterrupted.folder)
    with preempted_after(5):
        fit(experiment, tmp_path / "run")
    fit(experiment, tmp_path / "run")
    assert losses(tmp_path / "run") == uninterrupted.losses
    assert_same_bits(state_at(tmp_path / "run", STEPS), state_at(uninterrupted.workdir, STEPS))


STREAMING = StreamingConfig(enabled=True, shuffle_window=5, readers=1, validation_documents=4)


@pytest.mark.full
def test_resumed_stream_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    """Stopped within a file and a shuffle window; the files are moved before it resumes."""
    experiment = make_experiment(tmp_path, streaming=STREAMING)
    fit(experiment, tmp_path / "uninterrupted")
    with preempted_after(5):
        fit(experiment, tmp_path / "run")
    with CheckpointManager(tmp_path / "run" / "checkpoints") as checkpoints:
        [[cursor, *numbers]] = checkpoints.read_metadata(5)["data_position"]
    assert cursor == 5
    positions = [StreamPosition(*numbers[:6]), StreamPosition(*numbers[6:])]
    assert all(each.document and each.token for each in positions)
    assert positions[0].offset
    (tmp_path / "moved").mkdir()
    moved = make_experiment(tmp_path / "moved", streaming=STREAMING)
    fit(moved, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "uninterrupted")
    assert_same_bits(state_at(tmp_path / "run", STEPS), state_at(tmp_path / "uninterrupted", STEPS))
    evaluated = train.load(str(tmp_path / "run")).evaluate()
    assert {"loss", "loss/prose", "loss/code"} <= evaluated.keys()
