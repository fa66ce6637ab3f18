"""Reads what the watch says of each step, one step late: then nothing waits for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from train.recovery.config import RecoveryConfig
from train.recovery.detector import DETECTOR_METRICS, MONITORED_METRICS
from train.recovery.rollback import Anomaly
from train.step import Metrics
from train.telemetry.reporter import Reporter


class _Seen(NamedTuple):
    """A step that was dispatched."""

    step: int
    cursor: int
    metrics: Metrics


class AnomalyMonitor:
    """Tells of every update that was skipped, and of trouble."""

    def __init__(self, config: RecoveryConfig, report: Reporter):
        self._config, self._report = config, report
        self._waiting: _Seen | None = None

    def check(self, step: int, cursor: int, metrics: Metrics, *, wait: bool) -> Anomaly | None:
        """Looks at the step before this one; `wait`: at this one too, which waits for its end.

        Args:
          step: Its number.
          cursor: The number of its batch.
          metrics: What the engine said of it.
          now: Whether its state is about to be saved or judged.
        """
        waiting = self._waiting
        self._waiting = _Seen(step, cursor, metrics)
        trouble = self._read(waiting) if waiting else None
        if wait and not trouble:
            trouble, self._waiting = self._read(self._waiting), None
        return trouble

    def _read(self, seen: _Seen) -> Anomaly | None:
        if "strikes" not in seen.metrics or not float(seen.metrics["skipped"]):
            return None
        told = {name: float(seen.metrics[name]) for name in (*MONITORED_METRICS, *DETECTOR_METRICS)}
        why = describe_anomaly(told)
        self._report.log_event(
            "skipped",
            step=seen.step,
            batch=seen.cursor,
            **{name: told[name] for name in MONITORED_METRICS},
            why=why,
        )
        self._report.print_message(
            f"step {seen.step}: the update of batch {seen.cursor} is skipped: {why}"
        )
        risen = told["usual_loss"] > told["usual_loss_limit"]
        # What is in the weights is not helped by an update that is skipped.
        at_once = risen or not told["param_norm"] <= told["param_norm_limit"]
        if told["strikes"] < self._config.patience and not at_once:
            return None
        # A median has risen when half its window has.
        for_long = self._config.window // 2 if risen else int(told["strikes"]) - 1
        return Anomaly(max(seen.step - for_long, 1), seen.step, seen.cursor + 1, why)


def describe_anomaly(metrics: Mapping[str, float]) -> str:
    """What is wrong with a step, in words; `metrics` has `SEEN` and `REPORT`."""
    wrong = []
    for name in (*MONITORED_METRICS, "usual_loss"):
        value, most = metrics[name], metrics[f"{name}_limit"]
        called = "median loss" if name == "usual_loss" else name
        if not math.isfinite(value):
            wrong.append(f"{called} {value}")
        elif value > most:
            wrong.append(f"{called} {value:.4g}, more than {most:.4g}")
    return " and ".join(wrong)
