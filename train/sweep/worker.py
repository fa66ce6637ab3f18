"""Process that trains one run of a sweep: `python -m train.sweep.worker`.

It reads a request from standard input and writes an answer on standard output, both one JSON
object on a line. A run that exhausts memory or crashes ends this process and not the queue
(`train.sweep.queue`). When the queue dies, standard input ends: the worker then saves a checkpoint
and exits, so that nothing trains in the background unseen.
"""

import json
import os
import signal
import sys
import threading
import traceback
import types
from typing import Any

import filelock

import train
from train.assembly import make_task
from train.config.io import experiment_from_dict
from train.config.plugins import import_installed_plugins, import_modules
from train.errors import UserError
from train.runtime.signals import PREEMPTED_EXIT_STATUS, PreemptedError, exit_on_stop_signal
from train.telemetry.goodput import compute_goodput, read_time_records

PREDECESSOR_SECONDS = 120.0
"""Seconds to wait for the worker of a queue that was killed: it is saving its checkpoint."""


def main() -> int:
    """Answer the request; return the exit status."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_the_queue, daemon=True).start()
    with exit_on_stop_signal():
        try:
            answer = train_run(request)
        except PreemptedError:
            return PREEMPTED_EXIT_STATUS
        except UserError as error:
            answer = {"status": "failed", "error": " ".join(str(error).split())}
            print(f"error: {error}", file=sys.stderr)
        except Exception as error:  # noqa: BLE001 - reported, and the process ends
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            answer = {"status": "failed", "error": reason[:500]}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def train_run(request: dict[str, Any]) -> dict[str, Any]:
    """Train or resume one run; return its result as plain data."""
    import_installed_plugins()
    import_modules(request["imports"], "--import")
    experiment = experiment_from_dict(request["experiment"], request["workdir"])
    try:
        with filelock.FileLock(request["lock"]).acquire(timeout=PREDECESSOR_SECONDS):
            run = train.fit(experiment, request["workdir"], **request["warm_start"])
    except filelock.Timeout:
        raise UserError(
            f"{request['workdir']}: an earlier process still trains there; stop it first"
        ) from None
    # The metric depends on the corpus's labels at most, and to read the corpus again takes a while.
    labels = types.SimpleNamespace(labels=run.labels)
    metric = make_task(run.experiment).selection_metric(labels)
    return {
        "status": "finished",
        "metric": metric.name,
        "lower_is_better": metric.lower_is_better,
        "metrics": {name: float(value) for name, value in run.final_metrics.items()},
        "step": run.step,
        "seconds": compute_goodput(read_time_records(run.folder.time_log)).of_processes,
    }


def _stop_with_the_queue() -> None:
    """Wait for the end of standard input, then stop the run with a checkpoint."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
