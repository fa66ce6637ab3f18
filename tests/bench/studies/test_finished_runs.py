"""Finished runs of a study: what is kept, found again and refused."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.studies.finished_runs import FinishedRuns, compared_fields
from bench.studies.record import train_all
from tests.train.support import tiny
from train.errors import UserError
from train.experiment import CheckpointConfig, Experiment
from train.runtime.signals import PreemptedError
from train.sweep.grid import SweepRun
from train.sweep.sweep_folder import RunResult
from transformer import AttentionConfig, ConvolutionConfig, RoPE

FINISHED = RunResult("finished", "loss", True, {"loss": 1.5, "perplexity": 4.48}, 12, 20.04)


def run_of(experiment: Experiment) -> SweepRun:
    return SweepRun("some name", {}, experiment, 1.0)


def with_mixer(experiment: Experiment, mixer: Any) -> Experiment:
    block = dataclasses.replace(experiment.model.layer_pattern[0], mixer=mixer)
    model = dataclasses.replace(experiment.model, layer_pattern=(block,))
    return dataclasses.replace(experiment, model=model)


def test_runs_are_looked_up_by_their_settings(tmp_path: Path) -> None:
    file, first = tmp_path / "runs" / "study.jsonl", tiny(tmp_path)
    attention, rotary, convolution = (
        with_mixer(first, mixer)
        for mixer in (
            AttentionConfig(2),
            AttentionConfig(2, position=RoPE()),
            ConvolutionConfig(kernel_size=3),
        )
    )
    experiments = [attention, rotary, convolution, dataclasses.replace(attention, seed=7)]
    records = FinishedRuns(file)
    for number, each in enumerate(experiments):
        assert records.find(run_of(each)) is None
        result = dataclasses.replace(FINISHED, step=number)
        records.add(run_of(each), result, {"number": number})
    reopened = FinishedRuns(file)
    for number, each in enumerate(experiments):
        for store in (records, reopened):
            stored = store.find(run_of(each))
            assert stored is not None
            assert stored.result == dataclasses.replace(FINISHED, step=number, seconds=20.0)
            assert store.measured(run_of(each)) == {"number": number}
    # How a run is named and saved is not a difference; what it learns from is.
    quiet = dataclasses.replace(
        attention, name="other", log_every=3, checkpoint=CheckpointConfig(every=2)
    )
    assert reopened.find(run_of(quiet)) is not None
    changed: list[dict[str, Any]] = [{"steps": 13}, {"batch_size": 3}, {"seed": 8}]
    for changes in changed:
        assert reopened.find(run_of(dataclasses.replace(attention, **changes))) is None
    # Runs that start from other weights are others, wherever those lie.
    started = dataclasses.replace(run_of(attention), warm_start={"init_from": "here/first-1"})
    assert reopened.find(started) is None
    reopened.add(started, FINISHED, {})
    moved = dataclasses.replace(started, warm_start={"init_from": "there/first-1"})
    assert FinishedRuns(file).find(moved) is not None
    changed_start = dataclasses.replace(started, warm_start={"init_from": "here/first-2"})
    assert FinishedRuns(file).find(changed_start) is None
    # A later line replaces an earlier one.
    reopened.add(run_of(attention), dataclasses.replace(FINISHED, step=99), {})
    stored = FinishedRuns(file).find(run_of(attention))
    assert stored is not None
    assert stored.result.step == 99


def test_corpora_may_lie_elsewhere(tmp_path: Path) -> None:
    file, first = tmp_path / "study.jsonl", tiny(tmp_path)

    def on(path: str) -> SweepRun:
        data = dataclasses.replace(first.text_data, path=path)
        return run_of(dataclasses.replace(first, data=data))

    FinishedRuns(file).add(on("/home/me/wikitext-2/train.txt"), FINISHED, {})
    records = FinishedRuns(file)
    assert records.find(on("/mnt/data/wikitext-2/train.txt")) is not None
    assert records.find(on("/mnt/data/wikitext-103/train.txt")) is None


def test_machines_of_runs_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, first = tmp_path / "study.jsonl", tiny(tmp_path)
    runs = [run_of(dataclasses.replace(first, seed=seed)) for seed in range(4)]
    for run, name in zip(runs, ("NVIDIA H200", "NVIDIA H200", "AMD EPYC", ""), strict=True):
        monkeypatch.setattr("bench.studies.finished_runs.trained_on", lambda name=name: name)
        FinishedRuns(file).add(run, FINISHED, {})
    records = FinishedRuns(file)
    assert records.describe_machines([*runs, runs[0]]) == (
        "NVIDIA H200 (2 runs), AMD EPYC (1 run), not recorded (1 run)"
    )
    assert records.describe_machines(runs[3:]) == ""


def test_records_store_only_differences(tmp_path: Path) -> None:
    file = tmp_path / "study.jsonl"
    records = FinishedRuns(file)
    for seed in range(3):
        records.add(run_of(tiny(tmp_path, seed=seed)), FINISHED, {})
    base, *lines = file.read_text().splitlines()
    assert json.loads(base)["base"] == compared_fields(tiny(tmp_path, seed=0))
    assert len(lines) == 3
    assert all(len(line) < 400 for line in lines)


def test_new_settings_do_not_change_the_identity_of_a_run(tmp_path: Path) -> None:
    file, run = tmp_path / "study.jsonl", run_of(tiny(tmp_path))
    FinishedRuns(file).add(run, FINISHED, {})
    base, line = file.read_text().splitlines()
    fields = json.loads(base)["base"]
    del fields["ema.decay"]  # the version that wrote it had no such setting
    file.write_text(f"{json.dumps({'base': fields})}\n{line}\n")
    assert FinishedRuns(file).find(run) is not None
    fields["gone"] = 1  # and one that this version has no more
    file.write_text(f"{json.dumps({'base': fields})}\n{line}\n")
    assert FinishedRuns(file).find(run) is None


def test_new_setting_must_have_its_default(tmp_path: Path) -> None:
    file, first = tmp_path / "study.jsonl", tiny(tmp_path)
    FinishedRuns(file).add(run_of(first), FINISHED, {})
    base, line = file.read_text().splitlines()
    fields = json.loads(base)["base"]
    # The version that wrote it had no averages of weights and no LoRA.
    fields = {
        name: value
        for name, value in fields.items()
        if name != "ema.decay" and not name.startswith("lora.")
    }
    file.write_text(f"{json.dumps({'base': fields})}\n{line}\n")
    records = FinishedRuns(file)
    assert records.find(run_of(first)) is not None
    varied = [
        dataclasses.replace(first, ema=dataclasses.replace(first.ema, decay=0.9)),
        dataclasses.replace(first, lora=dataclasses.replace(first.lora, alpha=8.0)),
        dataclasses.replace(first, lora=dataclasses.replace(first.lora, targets=("query",))),
        dataclasses.replace(
            first, lora=dataclasses.replace(first.lora, targets=("query", "value", "key"))
        ),
    ]
    for each in varied:
        assert records.find(run_of(each)) is None
    # A part that is new as a whole: the block of this run is not the default.
    fields = {name: value for name, value in fields.items() if "layer_pattern" not in name}
    file.write_text(f"{json.dumps({'base': fields})}\n{line}\n")
    assert FinishedRuns(file).find(run_of(first)) is None


def test_longer_lists_are_of_other_runs(tmp_path: Path) -> None:
    """A pattern of one block is the beginning of every pattern that starts with that block."""
    first = tiny(tmp_path)
    records = FinishedRuns(tmp_path / "study.jsonl")
    records.add(run_of(first), FINISHED, {})
    block = first.model.layer_pattern[0]
    other = dataclasses.replace(block, mixer=ConvolutionConfig(kernel_size=3))
    model = dataclasses.replace(first.model, num_layers=2, layer_pattern=(block,))
    alone = dataclasses.replace(first, model=model)
    records.add(run_of(alone), FINISHED, {})
    for second in (block, other):
        longer = dataclasses.replace(model, layer_pattern=(block, second))
        assert records.find(run_of(dataclasses.replace(alone, model=longer))) is None
    assert records.find(run_of(alone)) is not None


def test_library_text_depends_on_the_python_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny(tmp_path)
    library = dataclasses.replace(
        experiment, data=dataclasses.replace(experiment.text_data, path="python:library")
    )
    records = FinishedRuns(tmp_path / "study.jsonl")
    for each in (experiment, library):
        records.add(run_of(each), FINISHED, {})
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert records.find(run_of(experiment)) is not None
    assert records.find(run_of(library)) is None


def test_damaged_record_raises(tmp_path: Path) -> None:
    file = tmp_path / "study.jsonl"
    FinishedRuns(file).add(run_of(tiny(tmp_path)), FINISHED, {})
    file.write_text(file.read_text()[:-20])
    with pytest.raises(UserError, match=r"study.jsonl line 2: is not a result of a run; restore"):
        FinishedRuns(file)


@pytest.mark.nightly
def test_study_continues_without_its_work_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        SweepRun(f"seed={seed}", {}, tiny(tmp_path, steps=2, seed=seed), 1.0) for seed in range(2)
    ]
    measured: list[str] = []

    def measure(run: SweepRun, folder: Path) -> Mapping[str, Any]:
        measured.append(run.name)
        return {"lines": len((folder / "metrics.jsonl").read_text().splitlines())}

    def study(count: int, **options: Any) -> dict[str, RunResult]:
        records = FinishedRuns(tmp_path / "study.jsonl")
        return train_all(runs[:count], tmp_path / "work", records, measure=measure, **options)

    first = study(1)
    assert measured == ["seed=0"]
    shutil.rmtree(tmp_path / "work")
    # Only the second is trained; with all there, no process is started.
    both = study(2)
    assert measured == ["seed=0", "seed=1"]
    assert not (tmp_path / "work" / "seed=0").exists()
    shutil.rmtree(tmp_path / "work")
    monkeypatch.setattr("subprocess.Popen", None)
    again = study(2)
    for name, result in both.items():
        assert again[name].metrics == result.metrics
        assert first.get(name, result).metrics == result.metrics
    assert FinishedRuns(tmp_path / "study.jsonl").measured(runs[1])["lines"] > 0


def test_finished_runs_are_kept_when_the_time_limit_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [SweepRun(f"seed={seed}", {}, tiny(tmp_path, seed=seed), 1.0) for seed in range(4)]
    failed = RunResult("failed", error="loss is nan")
    ended = {
        "seed=0": FINISHED,
        "seed=1": failed,
        "seed=2": RunResult("failed", error="its process was ended by SIGKILL"),
    }

    def stop(*arguments: Any, known: Mapping[str, RunResult], **options: Any) -> None:
        assert known == {}
        raise PreemptedError("its time is over")

    monkeypatch.setattr("bench.studies.record.run_sweep", stop)
    monkeypatch.setattr("bench.studies.record.SweepFolder.read_results", lambda self: dict(ended))
    for accept_failed, expected in ((False, [0]), (True, [0, 1])):
        records = FinishedRuns(tmp_path / f"{accept_failed}.jsonl")
        with pytest.raises(PreemptedError):
            train_all(runs, tmp_path / "work", records, accept_failed=accept_failed)
        stored = [number for number, run in enumerate(runs) if records.find(run) is not None]
        assert stored == expected
