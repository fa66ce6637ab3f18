"""Queue of a sweep: worker processes train its runs, and a killed queue goes on where it was.

Everything that has to survive is in the folder: finished runs in `results.json`, and of a run in
progress its checkpoints, from which `fit` resumes exactly. The queue itself has no state. It loads
no JAX: on an accelerator a second process would take memory from the workers.

Runs are trained in processes of their own, because an out-of-memory kill or a crash of XLA must
not end the others. A worker stays alive from run to run, since its start takes seconds.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from train.config.io import experiment_to_dict
from train.config.plugins import imports_of
from train.errors import UserError
from train.runtime.signals import STOP_SIGNALS, PreemptedError
from train.runtime.startup import with_huge_pages
from train.sweep.grid import SweepRun
from train.sweep.queue_progress import SweepProgress
from train.sweep.sweep_folder import RunResult, SweepFolder

POLL_SECONDS = 0.5
"""Seconds between looks at the metrics of the runs in progress."""


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
        pending = [run for run in runs if run.name not in finished]
        progress = SweepProgress(runs, finished, folder, quiet=quiet)
        if pending:
            _Queue(pending, folder, finished, processes, progress).run(limit_seconds)
    return {run.name: finished[run.name] for run in runs}


class _Queue:
    """One pass over the runs that are not finished."""

    def __init__(
        self,
        pending: Sequence[SweepRun],
        folder: SweepFolder,
        results: dict[str, RunResult],
        processes: int,
        progress: SweepProgress,
    ):
        self._pending = collections.deque(pending)
        self._folder, self._results, self._progress = folder, results, progress
        processes = min(processes, len(pending))
        self._workers = [_Worker(index, processes, folder) for index in range(processes)]
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    def run(self, limit_seconds: float) -> None:
        """Train the runs. On a stop signal, stop the workers and raise PreemptedError."""
        deadline = time.monotonic() + limit_seconds if limit_seconds else math.inf
        threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True)
            for worker in self._workers
        ]
        with _stop_signals() as received, self._progress:
            try:
                for thread in threads:
                    thread.start()
                self._handle_events(len(threads), received, deadline)
            finally:  # also if results cannot be written: nothing goes on unseen
                self._pending.clear()
                for worker in self._workers:
                    worker.stop()
                for thread in threads:
                    thread.join()
        if received:
            done, total = self._progress.counts()
            raise PreemptedError(
                f"{self._folder.path}: stopped by {received[0]} with {done} of {total} runs done; "
                "run the same command to resume"
            )

    def _handle_events(self, num_workers: int, received: list[str], deadline: float) -> None:
        signals_seen = 0
        while num_workers:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=POLL_SECONDS)
                if event.run is None:
                    num_workers -= 1
                elif event.result is None:
                    self._progress.start(event.run)
                else:
                    self._results[event.run.name] = event.result
                    self._folder.write_results(self._results)
                    self._progress.end(event.run, event.result)
            if not received and time.monotonic() > deadline:
                received.append("its time limit")
            if len(received) > signals_seen:
                self._pending.clear()
                for worker in self._workers:
                    worker.stop(kill=bool(signals_seen))  # a second signal does not wait
                signals_seen = len(received)
            self._progress.refresh()

    def _serve(self, worker: "_Worker") -> None:
        """Train runs in one worker until none is left. Runs in a thread."""
        try:
            while True:
                try:
                    run = self._pending.popleft()
                except IndexError:
                    return
                self._events.put(_Event(run))
                answer = worker.train(run)
                if answer["status"] != "stopped":
                    self._events.put(_Event(run, RunResult(**answer)))
        finally:
            worker.close()
            self._events.put(_Event())


@dataclasses.dataclass(frozen=True)
class _Event:
    """Message of a worker's thread: a run has started or ended, or, without a run, all is done."""

    run: SweepRun | None = None
    result: RunResult | None = None


class _Worker:
    """A process of `train.sweep.worker`, started when it is needed and again when it has died."""

    def __init__(self, index: int, num_workers: int, folder: SweepFolder):
        self._environment = worker_environment(os.environ, index, num_workers)
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._stopped = threading.Event()
        self._mutex = threading.Lock()

    def train(self, run: SweepRun) -> dict[str, Any]:
        """Train a run; return the fields of its `RunResult`, or the status `stopped`."""
        log = self._folder.log_path(run.name)
        request = {
            "workdir": str(self._folder.run_path(run.name)),
            "log": str(log),
            "imports": imports_of(run.experiment),
            "experiment": experiment_to_dict(run.experiment),
            "warm_start": dict(run.warm_start),
        }
        with self._mutex:
            if self._stopped.is_set():
                return {"status": "stopped"}
            process = self._process = self._process or self._start(log)
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"status": "failed", "exits": True}
        if answer.pop("exits", False):
            status = self._wait()
            answer.setdefault("error", f"{_describe_exit(status)}; see {log}")
        if answer["status"] != "finished" and self._stopped.is_set():
            return {"status": "stopped"}  # it may have been stopped before it could say so
        if answer["status"] == "stopped":
            return {"status": "failed", "error": "its process was told to stop"}
        return answer

    def stop(self, *, kill: bool = False) -> None:
        """Ask the process to save a checkpoint and exit, or kill it."""
        with self._mutex:
            self._stopped.set()
            if self._process is not None:
                (self._process.kill if kill else self._process.terminate)()

    def close(self) -> None:
        """End an idle process."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write("null\n")
                self._process.stdin.flush()
            self._wait()

    def _start(self, log: pathlib.Path) -> "subprocess.Popen[str]":
        with log.open("ab") as errors:
            return subprocess.Popen(
                # -P: the current folder is not put in front, where a train.py would hide this
                # package.
                [sys.executable, "-P", "-m", "train.sweep.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self._environment,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the queue, which stops its workers
            )

    def _wait(self) -> int:
        """Wait for the process to end; return its status."""
        with self._mutex:
            process, self._process = self._process, None
        if process is None:
            return 0
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return status


def worker_environment(
    environment: "os._Environ[str] | dict[str, str]", index: int, num_workers: int
) -> dict[str, str]:
    """Return the environment variables of a worker.

    Several workers share the memory of a GPU, or each has GPUs of its own if there are enough.
    """
    path = os.pathsep.join(each or str(pathlib.Path.cwd()) for each in sys.path)
    result = {**with_huge_pages(environment), "PYTHONPATH": path}
    if num_workers > 1:
        result.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        devices = [each for each in result.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        if len(devices) >= num_workers:
            result["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index::num_workers])
    return result


def _describe_exit(status: int) -> str:
    """Return what ended a process, as a reason of failure."""
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    cause = " (out of memory?)" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{cause}"


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[str]]:
    """Collect the names of stop signals in place of their default action."""
    received: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    previous: dict[signal.Signals, Any] = {}
    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started by nohup
        try:
            previous[number] = signal.signal(number, handle)
        except ValueError:  # only the main thread may set handlers
            break
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def check_results(results: dict[str, RunResult], workdir: str) -> None:
    """Raise UserError, one line, if a run failed."""
    failed = {name: each for name, each in results.items() if each.status == "failed"}
    if failed:
        name, first = next(iter(failed.items()))
        raise UserError(
            f"{workdir}: {len(failed)} of {len(results)} runs failed ({name}: {first.error}); "
            "run the same command to try them again"
        )
