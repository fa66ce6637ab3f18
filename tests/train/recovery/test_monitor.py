import math
from typing import Any

import jax.numpy as jnp
import pytest

from train.recovery.config import RecoveryConfig
from train.recovery.monitor import AnomalyMonitor, describe_anomaly

LIMITS = {
    "loss_limit": 3.0,
    "grad_norm_limit": 4.0,
    "param_norm_limit": 20.0,
    "median_loss_limit": 2.5,
}


class Heard:
    """What a report was told."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def log_event(self, event: str, **what: Any) -> None:
        self.events.append({"event": event, **what})

    def print_message(self, text: str) -> None:
        assert "is skipped" in text


def a_lookout(patience: int) -> tuple[AnomalyMonitor, Heard]:
    heard: Any = Heard()
    return AnomalyMonitor(RecoveryConfig(patience=patience), heard), heard


def metrics(
    strikes: int,
    *,
    loss: float = 2.0,
    norm: float = 1.0,
    weights: float = 10.0,
    usual: float = 2.0,
    skipped: bool | None = None,
) -> Any:
    """Of a step, the limits of all that is watched."""
    bad = strikes > 0 if skipped is None else skipped
    values = {"loss": loss, "grad_norm": norm, "param_norm": weights, "median_loss": usual}
    values |= {"skipped": bad, "consecutive_anomalies": strikes}
    return {name: jnp.float32(value) for name, value in {**values, **LIMITS}.items()}


def test_it_looks_one_step_late() -> None:
    lookout, heard = a_lookout(patience=2)
    for step, strikes in ((5, 0), (6, 1), (7, 2)):
        batch = step + 100
        assert lookout.check(step, batch, metrics(strikes, loss=9.0), wait=False) is None
    assert [(each["step"], each["batch"]) for each in heard.events] == [(6, 106)]
    trouble = lookout.check(8, 108, metrics(0), wait=False)
    assert trouble is not None
    assert (trouble.first_step, trouble.last_step, trouble.next_batch) == (6, 7, 108)
    assert trouble.reason == "loss 9, more than 3"


def test_it_looks_at_once_when_asked_to() -> None:
    lookout, heard = a_lookout(patience=1)
    assert lookout.check(5, 5, metrics(0), wait=False) is None
    trouble = lookout.check(6, 6, metrics(1, norm=5.0), wait=True)
    assert trouble is not None
    assert (trouble.first_step, trouble.last_step, trouble.next_batch) == (6, 6, 7)
    assert lookout.check(7, 7, metrics(0), wait=True) is None
    assert len(heard.events) == 1


def test_the_first_of_two_troubles_is_told() -> None:
    lookout, _ = a_lookout(patience=1)
    lookout.check(5, 5, metrics(1), wait=False)
    trouble = lookout.check(6, 6, metrics(2), wait=True)
    assert trouble is not None
    assert trouble.last_step == 5


def test_what_has_risen_began_half_a_window_ago() -> None:
    lookout, _ = a_lookout(patience=3)
    trouble = lookout.check(500, 600, metrics(1, usual=2.6), wait=True)
    assert trouble is not None
    assert (trouble.first_step, trouble.last_step, trouble.next_batch) == (450, 500, 601)
    assert trouble.reason == "median loss 2.6, more than 2.5"


@pytest.mark.parametrize("bad", [20.5, math.inf, math.nan])
def test_weights_out_of_line_are_not_waited_for(bad: float) -> None:
    """A bit that has flipped may be of a word that no batch has for a while."""
    lookout, _ = a_lookout(patience=3)
    trouble = lookout.check(500, 600, metrics(1, weights=bad), wait=True)
    assert trouble is not None
    assert (trouble.first_step, trouble.last_step, trouble.next_batch) == (500, 500, 601)


def test_an_overflow_is_told_and_is_no_trouble() -> None:
    lookout, heard = a_lookout(patience=1)
    bad = metrics(0, norm=math.inf, skipped=True)
    assert lookout.check(5, 5, bad, wait=True) is None
    [event] = heard.events
    assert event["why"] == "grad_norm inf"


def test_without_a_watch_there_is_nothing_to_see() -> None:
    lookout, heard = a_lookout(patience=1)
    unwatched = {"loss": jnp.float32(math.nan), "skipped": jnp.float32(1)}
    assert lookout.check(5, 5, unwatched, wait=True) is None
    assert not heard.events


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"loss": 3.5}, "loss 3.5, more than 3"),
        ({"grad_norm": 400.0}, "grad_norm 400, more than 4"),
        ({"param_norm": math.inf}, "param_norm inf"),
        ({"median_loss": 2.6}, "median loss 2.6, more than 2.5"),
        ({"loss": 3.5, "grad_norm": math.nan}, "loss 3.5, more than 3 and grad_norm nan"),
    ],
)
def test_what_is_wrong_in_words(values: dict[str, float], expected: str) -> None:
    fine = {"loss": 1.0, "grad_norm": 1.0, "param_norm": 1.0, "median_loss": 1.0}
    assert describe_anomaly({**fine, **LIMITS, **values}) == expected
