"""The queue of a sweep: what it keeps, resumes, records and rejects."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import train
from tests.train.support import assert_close, command, lines_of, losses, tiny, write_config
from tests.train.telemetry.clock import Clock
from train.errors import UserError
from train.experiment import CheckpointConfig
from train.runtime.progress import ProgressBar
from train.runtime.signals import PreemptedError
from train.sweep.grid import SweepRun
from train.sweep.queue import (
    check_results,
    last_metrics,
    run_sweep,
    update_bar,
    worker_environment,
)
from train.sweep.sweep_folder import RunResult, SweepFolder

Capture = pytest.CaptureFixture[str]


def runs_of(folder: Path, *seeds: int, **changes: Any) -> list[SweepRun]:
    return [SweepRun(f"seed={seed}", {}, tiny(folder, seed=seed, **changes), 1.0) for seed in seeds]


@pytest.mark.full
def test_failed_run_does_not_stop_the_others(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, later = write_config(tmp_path, steps="3"), tmp_path / "later.txt"
    workdir = tmp_path / "sweep"
    words = ["sweep", config, "--set", f"data.path={later},{tmp_path / 'text.txt'}"]
    words += ["--workdir", str(workdir), "--json"]
    first = command(capsys, *words)
    assert first.status == 1
    assert first.error.startswith(f"error: {workdir}: 1 of 2 runs failed (path=")
    good, failed = json.loads(first.output)["settings"]
    assert failed["runs"][0]["status"] == "failed"
    assert str(later) in failed["runs"][0]["error"]
    [run] = good["runs"]
    assert losses(workdir / run["name"]).keys() == {1, 2, 3}
    assert run["metrics"]["loss"] == good["mean"]
    # The same command trains what is missing, and leaves the finished run alone.
    later.write_text((tmp_path / "text.txt").read_text())
    before = (workdir / run["name"] / "logbook.jsonl").read_bytes()
    second = command(capsys, *words)
    assert (second.status, second.error) == (0, "")
    assert json.loads(second.output)["failed"] == 0
    assert (workdir / run["name"] / "logbook.jsonl").read_bytes() == before
    assert (workdir / "sweep.png").exists()
    # A third call has nothing to train and starts no process.
    monkeypatch.setattr(subprocess, "Popen", None)
    third = command(capsys, *words)
    assert third.output == second.output


@pytest.mark.full
def test_runs_start_with_the_weights_of_another(capsys: Capture, tmp_path: Path) -> None:
    config, source, workdir = write_config(tmp_path), tmp_path / "source", tmp_path / "sweep"
    assert command(capsys, "fit", config, "--steps", "3", "--workdir", str(source)).status == 0
    words = ["sweep", config, "--steps", "1", "--set", "learning_rate=1e-20"]
    words += ["--workdir", str(workdir)]
    missing = command(capsys, *words, "--init-from", str(tmp_path / "nothing"))
    assert missing.status == 1
    assert not workdir.exists()
    assert command(capsys, *words, "--init-from", str(source)).status == 0
    expected = train.load(str(source)).params
    begun = train.load(str(workdir / "learning_rate=1e-20,seed=0")).params
    assert_close(begun, expected, 1e-12)
    # The same folder is not taken for a sweep that starts elsewhere.
    other = command(capsys, *words)
    assert other.status == 1
    assert f'(init_from is "{source}" there and "" here)' in other.error


@pytest.mark.full
def test_time_limit_stops_a_run(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError, match="stopped by its time limit with 0 of 1 runs done"):
        run_sweep(runs_of(tmp_path, 0), str(tmp_path / "sweep"), limit_seconds=0.01, quiet=True)
    assert SweepFolder(str(tmp_path / "sweep")).read_results() == {}


PROGRAM = """
import sys
from pathlib import Path
from tests.train.sweep.test_queue import long_runs
from train.sweep.queue import run_sweep
run_sweep(long_runs(Path(sys.argv[1])), sys.argv[2], processes=int(sys.argv[3]))
"""


def long_runs(folder: Path) -> list[SweepRun]:
    """Return runs of some seconds, with frequent checkpoints."""
    return runs_of(folder, 0, 1, steps=720, checkpoint=CheckpointConfig(every=60), log_every=60)


def wait_for_step(workdir: Path, name: str, step: int) -> None:
    deadline = time.monotonic() + 300
    while last_metrics(SweepFolder(str(workdir)), name)[0] < step:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.05)


@pytest.mark.full
def test_killed_and_stopped_queue_resumes_exactly(tmp_path: Path) -> None:
    workdir, whole = tmp_path / "killed", tmp_path / "whole"
    expected = run_sweep(long_runs(tmp_path), str(whole), processes=2, quiet=True)
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path), str(workdir), "1"]
    error = ""
    for number, step in ((signal.SIGKILL, 120), (signal.SIGTERM, 360)):
        # The worker of a killed queue ends by itself; the next one waits until it has saved.
        with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
            wait_for_step(workdir, "seed=0", step)
            process.send_signal(number)
            _, error = process.communicate(timeout=120)
    assert "stopped by SIGTERM with 0 of 2 runs done; run the same command to resume" in error
    resumed = run_sweep(long_runs(tmp_path), str(workdir), quiet=True)
    for name in ("seed=0", "seed=1"):
        assert resumed[name].metrics == expected[name].metrics
        assert losses(workdir / name) == losses(whole / name)
    events = [event["event"] for event in lines_of(workdir / "seed=0" / "logbook.jsonl")]
    assert events.count("resumed") == 2


@pytest.mark.full
def test_killed_process_is_a_failed_run(tmp_path: Path) -> None:
    workdir = tmp_path / "sweep"
    arguments = [sys.executable, "-c", PROGRAM, str(tmp_path), str(workdir), "1"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(workdir, "seed=0", 60)
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
        )
        os.kill(int(listed.stdout.split()[0]), signal.SIGKILL)
        process.communicate(timeout=300)
    results = SweepFolder(str(workdir)).read_results()
    assert results["seed=0"].status == "failed"
    assert "was ended by SIGKILL (out of memory?)" in results["seed=0"].error
    assert results["seed=1"].status == "finished"


# ---- Without training ----


def test_folder_of_another_sweep_raises(tmp_path: Path) -> None:
    folder = SweepFolder(str(tmp_path / "sweep"))
    folder.path.mkdir()
    folder.write_sweep(runs_of(tmp_path, 0, 1))
    folder.check_same_sweep(runs_of(tmp_path, 0, 1))
    folder.check_same_sweep(runs_of(tmp_path, 0, 1, 2))  # more seeds
    with pytest.raises(UserError, match=r"another sweep \(steps is 12 there and 13 here\)"):
        folder.check_same_sweep(runs_of(tmp_path, 0, 1, steps=13))
    # Saved by a version without a setting: no difference.
    file = folder.path / "sweep.json"
    saved = json.loads(file.read_text())
    del saved["runs"]["seed=0"]["ema.decay"]
    file.write_text(json.dumps(saved))
    folder.check_same_sweep(runs_of(tmp_path, 0, 1))
    folder.write_sweep(runs_of(tmp_path, 0, 1))
    with pytest.raises(UserError, match="run seed=1 belongs to that one"):
        folder.check_same_sweep(runs_of(tmp_path, 0))


def test_runs_with_and_without_a_part_are_one_sweep(tmp_path: Path) -> None:
    """One has null where the other has fields."""
    without, with_part = runs_of(tmp_path, 0, 1)
    model = dataclasses.replace(without.experiment.model, final_norm=None)
    without = dataclasses.replace(
        without, experiment=dataclasses.replace(without.experiment, model=model)
    )
    assert with_part.experiment.model.final_norm is not None
    for number, runs in enumerate(([without, with_part], [with_part, without])):
        folder = SweepFolder(str(tmp_path / str(number)))
        folder.path.mkdir()
        folder.write_sweep(runs)
        folder.check_same_sweep(runs)
        swapped = [
            dataclasses.replace(run, experiment=other.experiment)
            for run, other in zip(runs, reversed(runs), strict=True)
        ]
        with pytest.raises(UserError, match="another sweep"):
            folder.check_same_sweep(swapped)


def test_folder_of_something_else_raises(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"contains other files \(thesis.tex\)"):
        SweepFolder(str(tmp_path)).check_same_sweep([])
    for folder in (str(tmp_path / "thesis.tex"), "gs://bucket/sweep"):
        with pytest.raises(UserError, match=r"is a file|needs a local disk"):
            SweepFolder(folder)


def test_one_queue_at_a_time(tmp_path: Path) -> None:
    with (
        SweepFolder(str(tmp_path)).lock(),
        pytest.raises(UserError, match="another process works on this sweep"),
        SweepFolder(str(tmp_path)).lock(),
    ):
        pass


def test_results_of_deleted_runs_are_forgotten_and_failed_ones_raise(tmp_path: Path) -> None:
    folder = SweepFolder(str(tmp_path))
    one = RunResult("finished", "loss", True, {"loss": 1.5}, 3, 2.0)
    folder.write_results({"a": one, "b": one})
    folder.run_path("a").mkdir()
    assert folder.read_results() == {"a": one}
    check_results({"a": one}, "runs/x")
    with pytest.raises(UserError, match=r"^runs/x: 1 of 2 runs failed \(b: no memory\)"):
        check_results({"a": one, "b": RunResult("failed", error="no memory")}, "runs/x")


def test_workers_share_or_split_accelerators() -> None:
    one = worker_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, 0, 1)
    assert one["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in one
    two = [worker_environment({"CUDA_VISIBLE_DEVICES": "0,1,2"}, index, 2) for index in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in two] == ["0,2", "1"]
    assert two[0]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert worker_environment({"CUDA_VISIBLE_DEVICES": "5"}, 1, 2)["CUDA_VISIBLE_DEVICES"] == "5"


def test_progress_weighs_runs_and_counts_steps(tmp_path: Path) -> None:
    folder, clock, output = SweepFolder(str(tmp_path)), Clock(), io.StringIO()
    runs = [
        dataclasses.replace(run, cost=cost)
        for run, cost in zip(runs_of(tmp_path, 0, 1, 2), (1.0, 1.0, 2.0), strict=True)
    ]
    results = {"seed=0": RunResult("finished", "loss", True, {"loss": 2.0})}
    console = Console(file=output, width=200)
    with ProgressBar(4, completed=1, description="sweep", console=console, clock=clock) as bar:
        lines = folder.run_path("seed=1") / "metrics.jsonl"
        lines.parent.mkdir()
        update_bar(bar, runs, results, runs[1:2], folder)
        for step, validation in ((3, True), (6, False), (9, False)):
            record = {"step": step, "split": "validation" if validation else "train", "loss": 2.5}
            with lines.open("a") as file:
                file.write(f"{json.dumps(record)}\n")
            clock.now += 30
            update_bar(bar, runs, results, runs[1:2], folder)
        with lines.open("a") as file:
            file.write('{"step": 7, "spl')
        assert last_metrics(folder, "seed=1") == (9, 2.5)
        results |= dict.fromkeys(["seed=1", "seed=2"], RunResult("failed", error="it is hot"))
        update_bar(bar, runs, results, [], folder)
    assert output.getvalue().splitlines() == [
        "sweep  1/3 done, seed=1 0/12  0:00:00 elapsed, ? left",
        "sweep  1/3 done, seed=1 0/12  0:00:30 elapsed, ? left",
        "sweep  1/3 done, seed=1 6/12 loss 2.5000  0:01:00 elapsed, ? left",
        # A quarter of a run of cost 1 in 30 s: 2.25 units are left.
        "sweep  1/3 done, seed=1 9/12 loss 2.5000  0:01:30 elapsed, 0:04:30 left",
        "sweep  3/3 done (2 failed)  0:01:30 elapsed, 0:00:00 left",
    ]
