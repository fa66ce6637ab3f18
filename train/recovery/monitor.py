"""Read the detector's verdicts on the host, one step late so that training does not wait."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from train.recovery.config import RecoveryConfig
from train.recovery.detector import DETECTOR_METRICS, MONITORED_METRICS
from train.step import Metrics
from train.telemetry.reporter import Reporter


@dataclasses.dataclass(frozen=True)
class Anomaly:
    """Consecutive anomalous steps that need a rollback."""

    first_step: int
    last_step: int
    next_batch: int
    """Cursor of the batch after the last step's."""
    reason: str
    """Description of the last step's anomaly."""


class _Dispatched(NamedTuple):
    """Step that was dispatched to the devices and may still be running."""

    step: int
    cursor: int
    metrics: Metrics


class AnomalyMonitor:
    """Log every skipped update, and return the anomalies that need a rollback."""

    def __init__(self, config: RecoveryConfig, reporter: Reporter):
        self._config, self._reporter = config, reporter
        self._pending: _Dispatched | None = None

    def find_anomaly(
        self, step: int, cursor: int, metrics: Metrics, *, wait: bool
    ) -> Anomaly | None:
        """Check the previous step. With `wait`, check this step too, which waits for its end.

        Args:
          step: Number of this step.
          cursor: Number of its batch.
          metrics: Metrics of this step, as returned by the engine.
          wait: The state of this step is about to be saved or evaluated, so it must be known to be
            normal.

        Returns:
          An anomaly that needs a rollback; None if there is none.
        """
        previous = self._pending
        self._pending = _Dispatched(step, cursor, metrics)
        # Fetching a metric waits for its step. The previous step has ended, or ends before this
        # one can start, so reading it leaves the devices busy.
        anomaly = self._read(previous) if previous else None
        if wait and not anomaly:
            anomaly, self._pending = self._read(self._pending), None
        return anomaly

    def _read(self, dispatched: _Dispatched) -> Anomaly | None:
        step, cursor, fetched = dispatched
        # One number decides in nearly every step; the rest is fetched only for an anomaly.
        if "consecutive_anomalies" not in fetched or not float(fetched["skipped"]):
            return None
        metrics = {name: float(fetched[name]) for name in (*MONITORED_METRICS, *DETECTOR_METRICS)}
        reason = describe_anomaly(metrics)
        monitored = {name: metrics[name] for name in MONITORED_METRICS}
        self._reporter.log_event("skipped", step=step, batch=cursor, **monitored, why=reason)
        self._reporter.print_message(
            f"step {step}: the update of batch {cursor} is skipped: {reason}"
        )
        risen = metrics["median_loss"] > metrics["median_loss_limit"]
        # Skipping further updates does not repair the weights, so this cannot wait for patience.
        # `not <=` and not `>`: a norm of NaN compares False with everything.
        weights_damaged = not metrics["param_norm"] <= metrics["param_norm_limit"]
        count = int(metrics["consecutive_anomalies"])
        if count < self._config.patience and not (risen or weights_damaged):
            return None
        # The median has risen once half of its window has.
        age = self._config.window // 2 if risen else count - 1
        return Anomaly(max(step - age, 1), step, cursor + 1, reason)


def describe_anomaly(metrics: Mapping[str, float]) -> str:
    """Describe which metrics of a step exceed their limits.

    Args:
      metrics: Values of `MONITORED_METRICS` and `DETECTOR_METRICS`.
    """
    problems = []
    for name in (*MONITORED_METRICS, "median_loss"):
        value, limit = metrics[name], metrics[f"{name}_limit"]
        label = "median loss" if name == "median_loss" else name
        if not math.isfinite(value):
            problems.append(f"{label} {value}")
        elif value > limit:
            problems.append(f"{label} {value:.4g}, more than {limit:.4g}")
    return " and ".join(problems)
