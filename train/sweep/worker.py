"""Process that trains runs of a sweep, one after another: `python -m train.sweep.worker`.

It reads requests from standard input and writes one answer to each on standard output, both one
JSON object a line; an answer with `exits` is the last one. Importing JAX and starting its backend
takes seconds, which runs share here. A run that exhausts memory or crashes ends this process and
not the queue (`train.sweep.queue`).

The request `null` ends it. When the queue dies, standard input ends without one: the worker then
saves a checkpoint and exits, so that nothing trains in the background unseen.
"""

import json
import os
import pathlib
import queue
import signal
import sys
import threading
import traceback
import types
from typing import Any, TextIO

import filelock

from train.errors import UserError
from train.runtime.signals import PREEMPTED_EXIT_STATUS, PreemptedError, exit_on_stop_signal

PREDECESSOR_SECONDS = 120.0
"""Seconds to wait for the worker of a queue that was killed: it is saving its checkpoint."""

CRASHED_EXIT_STATUS = 70
"""Exit status after an unexpected exception (EX_SOFTWARE): memory may be left in a bad state."""


def main() -> int:
    """Answer requests until the last one; return the exit status."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    with exit_on_stop_signal():
        while (request := json.loads(requests.get())) is not None:
            _redirect_output(request["log"])
            try:
                answer = train_run(request)
            except PreemptedError:
                _send(answers, {"status": "stopped", "exits": True})
                return PREEMPTED_EXIT_STATUS
            except UserError as error:
                answer = {"status": "failed", "error": " ".join(str(error).split())}
                print(f"error: {error}", file=sys.stderr, flush=True)
            except Exception as error:  # noqa: BLE001 - reported, and the process ends
                traceback.print_exc()
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                _send(answers, {"status": "failed", "error": reason[:500], "exits": True})
                return CRASHED_EXIT_STATUS
            _send(answers, answer)
    return 0


def train_run(request: dict[str, Any]) -> dict[str, Any]:
    """Train or resume one run; return its result as plain data."""
    import jax

    import train
    from train.assembly import make_task
    from train.config.io import experiment_from_dict
    from train.config.plugins import import_installed_plugins, import_modules
    from train.telemetry.goodput import compute_goodput, read_time_records

    import_installed_plugins()
    import_modules(request["imports"], "--import")
    experiment = experiment_from_dict(request["experiment"], request["workdir"])
    lock = filelock.FileLock(f"{request['log']}.lock")
    try:
        with lock.acquire(timeout=PREDECESSOR_SECONDS):
            run = train.fit(experiment, request["workdir"], **request["warm_start"])
    except filelock.Timeout:
        raise UserError(
            f"{request['workdir']}: an earlier process still trains there; stop it first"
        ) from None
    # The metric depends on the corpus's labels at most, and to read the corpus again takes a while.
    labels = types.SimpleNamespace(labels=run.labels)
    metric = make_task(run.experiment).selection_metric(labels)
    answer = {
        "status": "finished",
        "metric": metric.name,
        "lower_is_better": metric.lower_is_better,
        "metrics": {name: float(value) for name, value in run.final_metrics.items()},
        "step": run.step,
        "seconds": compute_goodput(read_time_records(run.folder.time_log)).of_processes,
    }
    del run
    jax.clear_caches()  # the programs of one run are of no use to the next
    return answer


def _read_requests(requests: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        requests.put(line)
        if line.strip() == "null":
            return
    # The queue was killed. A run in progress stops with a checkpoint.
    os.kill(os.getpid(), signal.SIGTERM)


def _redirect_output(log: str) -> None:
    """Append standard error and output, also of C++ libraries, to a run's log."""
    sys.stderr.flush()
    with pathlib.Path(log).open("ab") as file:
        os.dup2(file.fileno(), 2)
        os.dup2(file.fileno(), 1)


def _send(answers: TextIO, answer: dict[str, Any]) -> None:
    try:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    except BrokenPipeError:  # the queue was killed; the run's folder has the result
        os._exit(PREEMPTED_EXIT_STATUS)


if __name__ == "__main__":
    sys.exit(main())
