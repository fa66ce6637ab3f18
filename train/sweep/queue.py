"""Queue of a sweep: processes train its runs, and a killed queue goes on where it was.

Everything that has to survive is in the folder: finished runs in `results.json`, and of a run in
progress its checkpoints, from which `fit` resumes exactly. The queue itself has no state. It asks
JAX for no device: on an accelerator a second process would take memory from the runs.

Each run has a process of its own (`train.sweep.worker`), because an out-of-memory kill or a crash
of XLA must not end the others.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from train.config.io import experiment_to_dict
from train.config.plugins import imports_of
from train.errors import UserError
from train.runtime.progress import ProgressBar
from train.runtime.signals import PREEMPTED_EXIT_STATUS, PreemptedError, StopRequest
from train.runtime.stages import format_clock
from train.runtime.startup import with_huge_pages
from train.sweep.grid import SweepRun
from train.sweep.sweep_folder import RunResult, SweepFolder
from train.telemetry.event_log import parse_line

POLL_SECONDS = 0.2
"""Seconds between looks at the processes."""

TAIL_BYTES = 4096
"""Bytes at the end of metrics.jsonl that hold its last line."""


def run_sweep(
    runs: Sequence[SweepRun],
    workdir: str,
    *,
    processes: int = 1,
    limit_seconds: float = 0,
    quiet: bool = False,
    known: Mapping[str, RunResult] | None = None,
) -> dict[str, RunResult]:
    """Train all runs that are not finished yet, and return the results of all.

    Failed runs of an earlier call are tried again, from their checkpoints.

    Args:
      runs: From `train.sweep.grid.expand_grid`, in the order to train them in.
      workdir: Folder of the sweep.
      processes: Number of runs at a time.
      limit_seconds: Stop after this time, as a signal would. 0: no limit.
      quiet: Show no progress.
      known: Results by name of runs that ended elsewhere: these runs are not trained.

    Returns:
      Results by name, in the order of `runs`.

    Raises:
      UserError: The folder holds another sweep, or another process works on it.
      PreemptedError: This process was told to stop, or the time is over. Its runs have saved their
        checkpoints.
    """
    folder = SweepFolder(workdir)
    folder.check_same_sweep(runs)
    with folder.lock():
        folder.write_sweep(runs)
        results = folder.read_results()
        finished = {name: each for name, each in results.items() if each.status == "finished"}
        finished |= known or {}
        if any(run.name not in finished for run in runs):
            _train(runs, folder, finished, processes, limit_seconds, quiet)
    return {run.name: finished[run.name] for run in runs}


def _train(
    runs: Sequence[SweepRun],
    folder: SweepFolder,
    results: dict[str, RunResult],
    processes: int,
    limit_seconds: float,
    quiet: bool,
) -> None:
    """Train the runs without a result, and add theirs. On a stop signal, raise PreemptedError."""
    waiting = collections.deque(run for run in runs if run.name not in results)
    processes = min(processes, len(waiting))
    workers: dict[int, Worker] = {}
    deadline = time.monotonic() + limit_seconds if limit_seconds else math.inf
    total = sum(run.cost for run in runs)
    completed = sum(run.cost for run in runs if run.name in results)
    bar = ProgressBar(total, completed=completed, description="sweep", quiet=quiet)
    stopped_by: str | None = None
    with StopRequest(trains=False) as stop_request, bar, contextlib.ExitStack() as unseen:
        unseen.callback(lambda: stop_all(workers.values()))
        bar.update(completed + 1e-6 * total)  # the speed is measured from the first amount on
        while waiting or workers:
            if stopped_by is None:
                for slot in set(range(processes)) - workers.keys():
                    if waiting:
                        workers[slot] = Worker(waiting.popleft(), folder, slot, processes)
                late = "its time limit" if time.monotonic() > deadline else None
                if stopped_by := stop_request.requested_by() or late:
                    waiting.clear()
                    stop_all(workers.values())
            for slot, worker in list(workers.items()):
                if worker.process.poll() is not None:
                    del workers[slot]
                    result = worker.result()
                    if result.status == "finished" or stopped_by is None:
                        results[worker.run.name] = result
                        folder.write_results(results)
                        count = sum(run.name in results for run in runs)
                        bar.print(f"[{count}/{len(runs)}] {worker.run.name}: {_outcome(result)}")
            update_bar(bar, runs, results, [worker.run for worker in workers.values()], folder)
            time.sleep(POLL_SECONDS)
    if stopped_by:
        done = sum(run.name in results for run in runs)
        raise PreemptedError(
            f"{folder.path}: stopped by {stopped_by} with {done} of {len(runs)} runs done; "
            "run the same command to resume"
        )


class Worker:
    """A process that trains one run."""

    def __init__(self, run: SweepRun, folder: SweepFolder, slot: int, num_slots: int):
        self.run, self._log = run, folder.log_path(run.name)
        request = {
            "workdir": str(folder.run_path(run.name)),
            "lock": f"{self._log}.lock",
            "imports": imports_of(run.experiment),
            "experiment": experiment_to_dict(run.experiment),
            "warm_start": dict(run.warm_start),
        }
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                # -P: the current folder is not put in front, where a train.py would hide this
                # package.
                [sys.executable, "-P", "-m", "train.sweep.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_environment(os.environ, slot, num_slots),
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the queue, which stops its workers
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its status tells why it has ended
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()  # and left open: its end would stop the run

    def result(self) -> RunResult:
        """Return the result of the run, whose process has ended."""
        answer, _ = self.process.communicate()
        if answer:
            return RunResult(**json.loads(answer))
        status = self.process.returncode
        reason = f"its process ended with status {status}"
        if status == PREEMPTED_EXIT_STATUS:
            reason = "its process was told to stop"
        elif status < 0:
            name = signal.Signals(-status).name
            cause = " (out of memory?)" if name == "SIGKILL" else ""
            reason = f"its process was ended by {name}{cause}"
        return RunResult("failed", error=f"{reason}; see {self._log}")


def stop_all(workers: Iterable[Worker]) -> None:
    """Ask the processes to save a checkpoint and exit."""
    for worker in workers:
        worker.process.terminate()


def worker_environment(environment: Mapping[str, str], slot: int, num_slots: int) -> dict[str, str]:
    """Return the environment variables of a worker.

    Several workers share the memory of a GPU, or each has GPUs of its own if there are enough.
    """
    path = os.pathsep.join(each or str(pathlib.Path.cwd()) for each in sys.path)
    result = {**with_huge_pages(environment), "PYTHONPATH": path}
    if num_slots > 1:
        result.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        devices = [each for each in result.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        if len(devices) >= num_slots:
            result["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot::num_slots])
    return result


def _outcome(result: RunResult) -> str:
    if result.status == "failed":
        return f"failed: {result.error}"
    return f"{result.metric} {result.value:.4f} in {format_clock(result.seconds)}"


def update_bar(
    bar: ProgressBar,
    runs: Sequence[SweepRun],
    results: Mapping[str, RunResult],
    running: Sequence[SweepRun],
    folder: SweepFolder,
) -> None:
    """Show how much of the sweep's cost is done, by the steps of the runs in progress."""
    completed = sum(run.cost for run in runs if run.name in results)
    done = sum(run.name in results for run in runs)
    failed = sum(result.status == "failed" for result in results.values())
    status = f"{done}/{len(runs)} done{f' ({failed} failed)' if failed else ''}"
    for number, run in enumerate(running):
        step, loss = last_metrics(folder, run.name)
        # Not all of it: the run is evaluated yet, and a bar that is full prints its last line.
        completed += run.cost * min(step / run.experiment.steps, 0.999)
        if number == 0:
            status += f", {run.name} {step}/{run.experiment.steps}"
            status += "" if loss is None else f" loss {loss:.4f}"
    bar.update(completed, status)


def last_metrics(folder: SweepFolder, name: str) -> tuple[int, float | None]:
    """Return the last logged step of a run and its training loss; (0, None) before the first."""
    try:
        with (folder.run_path(name) / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return 0, None
    for line in reversed(lines):
        record = parse_line(line)  # the lines at either end may be cut off
        if record is not None and record["split"] == "train":
            return record["step"], record["loss"] if isinstance(record["loss"], float) else None
    return 0, None


def check_results(results: dict[str, RunResult], workdir: str) -> None:
    """Raise UserError, one line, if a run failed."""
    failed = {name: each for name, each in results.items() if each.status == "failed"}
    if failed:
        name, first = next(iter(failed.items()))
        raise UserError(
            f"{workdir}: {len(failed)} of {len(results)} runs failed ({name}: {first.error}); "
            "run the same command to try them again"
        )
