import math
from typing import Any

import jax.numpy as jnp
import pytest

from train.detector import RecoveryConfig
from train.rollback import AnomalyMonitor, describe_anomaly

LIMITS = {
    "loss_limit": 3.0,
    "grad_norm_limit": 4.0,
    "param_norm_limit": 20.0,
    "median_loss_limit": 2.5,
}


class FakeReporter:
    """Reporter that records its events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def log_event(self, event: str, **what: Any) -> None:
        self.events.append({"event": event, **what})

    def print_message(self, text: str) -> None:
        assert "is skipped" in text


def make_monitor(patience: int) -> tuple[AnomalyMonitor, FakeReporter]:
    reporter: Any = FakeReporter()
    return AnomalyMonitor(RecoveryConfig(patience=patience), reporter), reporter


def metrics(
    count: int,
    *,
    loss: float = 2.0,
    norm: float = 1.0,
    weights: float = 10.0,
    usual: float = 2.0,
    skipped: bool | None = None,
) -> Any:
    """Return metrics of a step, with all limits."""
    bad = count > 0 if skipped is None else skipped
    values = {"loss": loss, "grad_norm": norm, "param_norm": weights, "median_loss": usual}
    values |= {"skipped": bad, "consecutive_anomalies": count}
    return {name: jnp.float32(value) for name, value in {**values, **LIMITS}.items()}


def test_metrics_are_read_one_step_late() -> None:
    monitor, reporter = make_monitor(patience=2)
    for step, count in ((5, 0), (6, 1), (7, 2)):
        batch = step + 100
        assert monitor.find_anomaly(step, batch, metrics(count, loss=9.0), wait=False) is None
    assert [(each["step"], each["batch"]) for each in reporter.events] == [(6, 106)]
    anomaly = monitor.find_anomaly(8, 108, metrics(0), wait=False)
    assert anomaly is not None
    assert (anomaly.first_step, anomaly.last_step, anomaly.next_batch) == (6, 7, 108)
    assert anomaly.reason == "loss 9, more than 3"


def test_metrics_are_read_immediately_on_request() -> None:
    monitor, reporter = make_monitor(patience=1)
    assert monitor.find_anomaly(5, 5, metrics(0), wait=False) is None
    anomaly = monitor.find_anomaly(6, 6, metrics(1, norm=5.0), wait=True)
    assert anomaly is not None
    assert (anomaly.first_step, anomaly.last_step, anomaly.next_batch) == (6, 6, 7)
    assert monitor.find_anomaly(7, 7, metrics(0), wait=True) is None
    assert len(reporter.events) == 1


def test_first_of_two_anomalies_is_reported() -> None:
    monitor, _ = make_monitor(patience=1)
    monitor.find_anomaly(5, 5, metrics(1), wait=False)
    anomaly = monitor.find_anomaly(6, 6, metrics(2), wait=True)
    assert anomaly is not None
    assert anomaly.last_step == 5


def test_slow_rise_started_half_a_window_earlier() -> None:
    monitor, _ = make_monitor(patience=3)
    anomaly = monitor.find_anomaly(500, 600, metrics(1, usual=2.6), wait=True)
    assert anomaly is not None
    assert (anomaly.first_step, anomaly.last_step, anomaly.next_batch) == (450, 500, 601)
    assert anomaly.reason == "median loss 2.6, more than 2.5"


@pytest.mark.parametrize("bad", [20.5, math.inf, math.nan])
def test_outlier_parameter_norms_need_no_patience(bad: float) -> None:
    """A flipped bit may be in the embedding of a token that no batch contains for a while."""
    monitor, _ = make_monitor(patience=3)
    anomaly = monitor.find_anomaly(500, 600, metrics(1, weights=bad), wait=True)
    assert anomaly is not None
    assert (anomaly.first_step, anomaly.last_step, anomaly.next_batch) == (500, 500, 601)


def test_overflow_is_logged_and_is_not_an_anomaly() -> None:
    monitor, reporter = make_monitor(patience=1)
    bad = metrics(0, norm=math.inf, skipped=True)
    assert monitor.find_anomaly(5, 5, bad, wait=True) is None
    [event] = reporter.events
    assert event["reason"] == "grad_norm inf"


def test_disabled_monitor_reports_nothing() -> None:
    monitor, reporter = make_monitor(patience=1)
    unwatched = {"loss": jnp.float32(math.nan), "skipped": jnp.float32(1)}
    assert monitor.find_anomaly(5, 5, unwatched, wait=True) is None
    assert not reporter.events


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"loss": 3.0, "param_norm": math.inf}, "param_norm inf"),
        ({"grad_norm": 400.0, "median_loss": 2.5}, "grad_norm 400, more than 4"),
        ({"loss": 3.5, "grad_norm": math.nan}, "loss 3.5, more than 3 and grad_norm nan"),
    ],
)
def test_description_of_an_anomaly(values: dict[str, float], expected: str) -> None:
    fine = {"loss": 1.0, "grad_norm": 1.0, "param_norm": 1.0, "median_loss": 1.0}
    assert describe_anomaly({**fine, **LIMITS, **values}) == expected
