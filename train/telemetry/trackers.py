"""Optional experiment trackers beside TensorBoard: Weights & Biases and MLflow.

Each tracker has a thread of its own, so that a slow server does not slow training down. A tracker
that fails is left out from there on, with one warning: `metrics.jsonl` has everything.
"""

from __future__ import annotations

import abc
import dataclasses
import html
import importlib
import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from train.config.io import experiment_to_dict, flatten_experiment
from train.errors import UserError, as_user_error
from train.run_folder.folder import RunFolder, read_json
from train.runtime.signals import PreemptedError
from train.runtime.writing import is_local, write_atomically

if TYPE_CHECKING:
    from train.experiment import Experiment

Outcome = Literal["finished", "preempted", "failed"]

CLOSE_SECONDS = 60.0
"""Longest wait at the end of a run for what a tracker has not sent yet."""

MAX_PENDING = 10_000
"""Calls that may wait for a tracker's server before the tracker is left out."""

_MLFLOW_PARAMS = 100  # limit of one request
_MLFLOW_VALUE_CHARACTERS = 500


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """Description of a run that a tracker receives."""

    name: str
    project: str
    folder: RunFolder
    experiment: Experiment
    run_id: str
    """Id that the tracker gave the run before; empty for a new run."""


class Tracker(abc.ABC):
    """Interface of a tracker. All calls come from one thread, and any may raise."""

    @abc.abstractmethod
    def start(self, run: TrackedRun) -> str:
        """Start a run, or continue the one of `run.run_id`; return its id."""

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics by name (`train/loss`) at a step."""

    @abc.abstractmethod
    def log_sample(self, step: int, text: str) -> None:
        """Send a generated text."""

    @abc.abstractmethod
    def finish(self, outcome: Outcome) -> None:
        """End the run, or leave it to be continued."""


class WandbTracker(Tracker):
    """Weights & Biases. `WANDB_MODE=offline` keeps the files in the run's folder."""

    def __init__(self, wandb: ModuleType):
        self._wandb: Any = wandb
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """See `Tracker`."""
        run_id = run.run_id or secrets.token_hex(4)
        local = is_local(run.folder.path)
        self._run = self._wandb.init(
            project=run.project,
            name=run.name,
            id=run_id,
            resume="allow",
            config=experiment_to_dict(run.experiment),
            dir=str(run.folder.path) if local else None,
            settings=self._wandb.Settings(silent=True),
        )
        # A rollback repeats steps, which the tracker's own counter refuses.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({"step": step, **metrics})

    def log_sample(self, step: int, text: str) -> None:
        """See `Tracker`."""
        markup = self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self._run.log({"step": step, "sample": markup})

    def finish(self, outcome: Outcome) -> None:
        """See `Tracker`."""
        self._run.summary["outcome"] = outcome
        if outcome == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


class MlflowTracker(Tracker):
    """MLflow. The server or folder is that of `MLFLOW_TRACKING_URI`."""

    STATUS: Mapping[Outcome, str] = {
        "finished": "FINISHED",
        "preempted": "KILLED",
        "failed": "FAILED",
    }

    def __init__(self, mlflow: ModuleType):
        self._mlflow: Any = mlflow
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> str:
        """See `Tracker`."""
        # The client, not the module's functions: those have one run for the whole process.
        self._client = self._mlflow.MlflowClient()
        if run.run_id:
            self._run_id = run.run_id
            self._client.update_run(run.run_id, status="RUNNING")
            return run.run_id
        known = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            known.experiment_id if known else self._client.create_experiment(run.project)
        )
        self._run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        fields = [
            self._mlflow.entities.Param(name, str(value)[:_MLFLOW_VALUE_CHARACTERS])
            for name, value in flatten_experiment(run.experiment).items()
        ]
        for start in range(0, len(fields), _MLFLOW_PARAMS):
            self._client.log_batch(self._run_id, params=fields[start : start + _MLFLOW_PARAMS])
        return self._run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker`."""
        now = int(time.time() * 1000)
        values = [self._mlflow.entities.Metric(n, x, now, step) for n, x in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def log_sample(self, step: int, text: str) -> None:
        """See `Tracker`."""
        self._client.log_text(self._run_id, text, f"samples/step-{step:08}.txt")

    def finish(self, outcome: Outcome) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._run_id, status=self.STATUS[outcome])


TRACKERS: dict[str, Callable[[ModuleType], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
"""Trackers by the name of their package, which is also the name of their extra."""


class Trackers:
    """The trackers that a run asks for. None of its methods raises or waits, but `close`."""

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        warn: Callable[[str], None],
        *,
        is_main_process: bool = True,
    ):
        """Start the trackers of `experiment.tracking`, each in a thread.

        Args:
          folder: Folder of the run. It keeps the ids, with which a resumed run continues.
          experiment: Settings of the run.
          warn: Prints a line.
          is_main_process: The others have no trackers.

        Raises:
          UserError: The package of a tracker is not installed.
        """
        self._folder, self._threads = folder, []
        names = experiment.tracking.trackers if is_main_process else ()
        trackers = {name: TRACKERS[name](_import_tracker(name)) for name in names}
        self._ids = _read_ids(folder) if names else {}
        self._lock = threading.Lock()
        for name, tracker in trackers.items():
            run = TrackedRun(
                experiment.name,
                experiment.tracking.project,
                folder,
                experiment,
                self._ids.get(name, ""),
            )
            self._threads.append(_TrackerThread(name, tracker, run, self._keep_id, warn))

    def log(self, step: int, split: str, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of a split."""
        values = {f"{split}/{name}": float(value) for name, value in metrics.items()}
        for thread in self._threads:
            thread.submit("log", step, values)

    def log_sample(self, step: int, text: str) -> None:
        """Send a generated text."""
        for thread in self._threads:
            thread.submit("log_sample", step, text)

    def close(self, error: BaseException | None) -> None:
        """End the trackers' runs, and wait a while for what is not sent yet."""
        outcome: Outcome = "finished"
        if error is not None:
            outcome = "preempted" if isinstance(error, PreemptedError) else "failed"
        for thread in self._threads:
            thread.submit("finish", outcome)
        for thread in self._threads:
            thread.close()

    def _keep_id(self, name: str, run_id: str) -> None:
        with self._lock:
            self._ids[name] = run_id
            write_atomically(self._folder.trackers, json.dumps(self._ids, indent=1) + "\n")


class _TrackerThread:
    """Thread that calls one tracker, until the first error."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        keep_id: Callable[[str, str], None],
        warn: Callable[[str], None],
    ):
        self._name, self._tracker, self._warn, self._keep_id = name, tracker, warn, keep_id
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue()
        self._failed = False
        self._thread = threading.Thread(
            target=self._work, args=(run,), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def submit(self, method: str, *arguments: Any) -> None:
        if self._calls.qsize() >= MAX_PENDING:
            self._fail(f"{MAX_PENDING} calls wait for it")
        if not self._failed:
            self._calls.put((method, arguments))

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._fail(f"has not sent everything in {CLOSE_SECONDS:g} s")

    def _work(self, run: TrackedRun) -> None:
        try:
            self._keep_id(self._name, self._tracker.start(run))
            while (call := self._calls.get()) is not None:
                if not self._failed:
                    method, arguments = call
                    getattr(self._tracker, method)(*arguments)
        except Exception as error:  # noqa: BLE001
            # A tracker only shows how the run is doing: no error of it may end the training.
            self._fail(str(error).strip().partition("\n")[0] or type(error).__name__)

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._warn(
                f"tracking.trackers {self._name}: {reason}; the run goes on without it, and "
                "metrics.jsonl has all metrics"
            )


def _import_tracker(name: str) -> ModuleType:
    """Return the package of a tracker. Raises UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"tracking.trackers {name}: is not installed; pip install 'linen-transformer[{name}]', "
            "or leave it out"
        ) from error


def _read_ids(folder: RunFolder) -> dict[str, str]:
    """Return the id of the run in each tracker that has one."""
    with as_user_error(str(folder.trackers)):
        if not folder.trackers.exists():
            return {}
    ids = read_json(folder.trackers)
    if not isinstance(ids, dict):
        raise UserError(
            f"{folder.trackers}: is not a list of tracker ids; delete it, and trackers start "
            "new runs"
        )
    return {str(name): str(run_id) for name, run_id in ids.items()}
