"""Optional experiment trackers beside TensorBoard: Weights & Biases and MLflow.

A thread calls them, so that a slow server does not slow training down. A tracker that fails is left
out from there on, with one warning: `metrics.jsonl` has everything.
"""

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
from typing import Any, Literal

from train.errors import UsageError, UserError, as_damaged
from train.files import AnyPath
from train.runtime.signals import PreemptedError
from train.runtime.writing import is_local, write_atomically
from train.settings import Settings

TrackerName = Literal["wandb", "mlflow"]

Outcome = Literal["finished", "preempted", "failed"]


@dataclasses.dataclass(frozen=True)
class TrackingConfig(Settings, part="tracking"):
    """Experiment trackers that are sent config, metrics and samples, beside the run's own files."""

    trackers: tuple[TrackerName, ...] = ()
    """wandb: Weights & Biases. mlflow: MLflow. Each needs the extra of the same name, and reads
    server and account from its own environment variables. Empty: none."""
    project: str = "linen-transformer"
    """Project of Weights & Biases, or experiment of MLflow, that the run appears in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.trackers)) < len(self.trackers):
            raise UsageError(f"tracking.trackers {' '.join(self.trackers)}: name each once")
        if not self.project:
            raise UsageError("tracking.project: is empty; give a name")


CLOSE_SECONDS = 60.0
"""Longest wait at the end of a run for what a tracker has not sent yet."""

MAX_PENDING = 10_000
"""Calls that may wait for the trackers' servers; others are dropped."""

_MLFLOW_PARAMS = 100  # limit of one request
_MLFLOW_VALUE_CHARACTERS = 500


class WandbTracker:
    """Weights & Biases. `WANDB_MODE=offline` keeps the files in the run's folder."""

    def __init__(self, wandb: ModuleType):
        self._wandb: Any = wandb
        self._run: Any = None

    def start(
        self, run_id: str, name: str, project: str, folder: AnyPath, settings: Mapping[str, Any]
    ) -> str:
        """Start a run, or continue the one that had the id; return its id."""
        run_id = run_id or secrets.token_hex(4)
        self._run = self._wandb.init(
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            config=dict(settings),
            dir=str(folder) if is_local(folder) else None,
            settings=self._wandb.Settings(silent=True),
        )
        # A rollback repeats steps, which the tracker's own counter refuses.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics by name (`train/loss`) at a step."""
        self._run.log({"step": step, **metrics})

    def log_sample(self, step: int, text: str) -> None:
        """Send a generated text."""
        markup = self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self._run.log({"step": step, "sample": markup})

    def finish(self, outcome: Outcome) -> None:
        """End the run, or leave it to be continued."""
        self._run.summary["outcome"] = outcome
        if outcome == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


class MlflowTracker:
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

    def start(
        self, run_id: str, name: str, project: str, folder: AnyPath, settings: Mapping[str, Any]
    ) -> str:
        """Start a run, or continue the one that had the id; return its id."""
        # The client, not the module's functions: those have one run for the whole process.
        self._client = self._mlflow.MlflowClient()
        self._run_id = run_id
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        known = self._client.get_experiment_by_name(project)
        experiment_id = known.experiment_id if known else self._client.create_experiment(project)
        self._run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
        fields = [
            self._mlflow.entities.Param(setting, str(value)[:_MLFLOW_VALUE_CHARACTERS])
            for setting, value in settings.items()
        ]
        for start in range(0, len(fields), _MLFLOW_PARAMS):
            self._client.log_batch(self._run_id, params=fields[start : start + _MLFLOW_PARAMS])
        return self._run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics by name (`train/loss`) at a step."""
        now = int(time.time() * 1000)
        values = [self._mlflow.entities.Metric(n, x, now, step) for n, x in metrics.items()]
        self._client.log_batch(self._run_id, metrics=values)

    def log_sample(self, step: int, text: str) -> None:
        """Send a generated text."""
        self._client.log_text(self._run_id, text, f"samples/step-{step:08}.txt")

    def finish(self, outcome: Outcome) -> None:
        """End the run, or leave it to be continued."""
        self._client.set_terminated(self._run_id, status=self.STATUS[outcome])


Tracker = WandbTracker | MlflowTracker
"""Tracker of experiments. All calls come from one thread, and any may raise."""

TRACKERS: dict[TrackerName, Callable[[ModuleType], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
"""Trackers by the name of their package, which is also the name of their extra."""


class Trackers:
    """The trackers that a run asks for. None of its methods raises or waits, but `close`."""

    def __init__(
        self,
        config: TrackingConfig,
        folder: AnyPath,
        name: str,
        settings: Mapping[str, Any],
        warn: Callable[[str], None],
    ):
        """Start the trackers, in a thread.

        Args:
          config: Trackers and their project.
          folder: Folder of the run. Its `trackers.json` keeps the ids, with which a resumed run
            continues.
          name: Name of the run.
          settings: All settings of the run by dotted path.
          warn: Prints a line.

        Raises:
          UserError: The package of a tracker is not installed.
        """
        self._trackers = {each: TRACKERS[each](_import_tracker(each)) for each in config.trackers}
        self._warn = warn
        self._calls: queue.Queue[Callable[[TrackerName, Tracker], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        if not self._trackers:
            return
        file = folder / "trackers.json"
        ids: dict[str, str] = {}
        if file.exists():
            with as_damaged(str(file), "JSON", "delete it, and each tracker begins a new run"):
                ids = json.loads(file.read_text())

        def start(kind: TrackerName, tracker: Tracker) -> None:
            ids[kind] = tracker.start(ids.get(kind, ""), name, config.project, folder, settings)
            write_atomically(file, json.dumps(ids, indent=1) + "\n")

        self._calls.put(start)
        self._thread.start()

    def log(self, step: int, split: str, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of a split."""
        values = {f"{split}/{name}": float(value) for name, value in metrics.items()}
        self._submit(lambda _, tracker: tracker.log(step, values))

    def log_sample(self, step: int, text: str) -> None:
        """Send a generated text."""
        self._submit(lambda _, tracker: tracker.log_sample(step, text))

    def close(self, error: BaseException | None) -> None:
        """End the trackers' runs, and wait a while for what is not sent yet."""
        if not self._thread.is_alive():
            return
        outcome: Outcome = "finished"
        if error is not None:
            outcome = "preempted" if isinstance(error, PreemptedError) else "failed"
        self._calls.put(lambda _, tracker: tracker.finish(outcome))
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            for name in list(self._trackers):
                self._warn_of(name, f"has not sent everything in {CLOSE_SECONDS:g} s")

    def _submit(self, call: Callable[[TrackerName, Tracker], None]) -> None:
        # A server that has hung for so long gets no more: the calls would fill the memory.
        if self._trackers and self._calls.qsize() < MAX_PENDING:
            self._calls.put(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            for name, tracker in list(self._trackers.items()):
                try:
                    call(name, tracker)
                except Exception as error:  # noqa: BLE001
                    # A tracker only shows how the run is doing: no error of it may end training.
                    del self._trackers[name]
                    reason = str(error).strip().partition("\n")[0] or type(error).__name__
                    self._warn_of(name, reason)

    def _warn_of(self, name: str, reason: str) -> None:
        self._warn(
            f"tracking.trackers {name}: {reason}; the run goes on without it, and metrics.jsonl "
            "has all metrics"
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
