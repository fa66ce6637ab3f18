import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from train.errors import UsageError
from train.optim.schedules import ScheduleConfig
from train.step import scheduled_rate

KINDS = ("cosine", "linear", "inverse_sqrt", "warmup_stable_decay", "constant")


NUMBERS = np.arange(1, 1025)
"""Update numbers of every test: one length, so that JAX compiles an operation once."""


def rates(config: ScheduleConfig, steps: int, *, width: int = 64) -> np.ndarray:
    """Return the rates of all updates until after the end, by number; element 0 is unused."""
    schedule = config.make(steps=steps, width=width)
    rates = scheduled_rate(schedule, jnp.asarray(NUMBERS))
    assert rates.dtype == jnp.float32
    actual = np.broadcast_to(np.asarray(rates, np.float64), NUMBERS.shape)
    return np.concatenate([[np.nan], actual])


def test_cosine() -> None:
    actual = rates(ScheduleConfig("cosine", 0.4, warmup_steps=5, min_lr_ratio=0.25), steps=25)
    np.testing.assert_allclose(actual[1:6], [0.08, 0.16, 0.24, 0.32, 0.4], rtol=1e-6)
    assert actual[15] == pytest.approx((0.4 + 0.1) / 2, rel=1e-6)  # halfway down
    for n in range(5, 26):
        half = (1 + math.cos(math.pi * (n - 5) / 20)) / 2
        assert actual[n] == pytest.approx(0.1 + 0.3 * half, rel=1e-5), n
    assert actual[25] == pytest.approx(0.1, rel=1e-6)


def test_linear() -> None:
    actual = rates(ScheduleConfig("linear", 0.4, warmup_steps=4, min_lr_ratio=0.5), steps=8)
    expected = [0.1, 0.2, 0.3, 0.4, 0.35, 0.3, 0.25, 0.2]
    np.testing.assert_allclose(actual[1:9], expected, rtol=1e-6)


def test_warmup_stable_decay() -> None:
    config = ScheduleConfig(
        "warmup_stable_decay", 0.6, warmup_steps=3, min_lr_ratio=0, decay_fraction=0.3
    )
    actual = rates(config, steps=20)
    np.testing.assert_allclose(actual[1:4], [0.2, 0.4, 0.6], rtol=1e-6)
    np.testing.assert_allclose(actual[3:15], 0.6, rtol=1e-6)
    falling = [0.5, 0.4, 0.3, 0.2, 0.1, 0.0]  # 0.3 of 20 steps
    np.testing.assert_allclose(actual[15:21], falling, rtol=1e-5, atol=1e-7)


def test_warmup_stable_decay_shorter_than_its_decay() -> None:
    config = ScheduleConfig(
        "warmup_stable_decay", 0.8, warmup_steps=2, min_lr_ratio=0.5, decay_fraction=1.0
    )
    actual = rates(config, steps=6)
    np.testing.assert_allclose(actual[1:7], [0.4, 0.8, 0.7, 0.6, 0.5, 0.4], rtol=1e-6)


def test_constant_and_no_warmup() -> None:
    actual = rates(ScheduleConfig("constant", 0.3, warmup_steps=0), 4)
    np.testing.assert_allclose(actual[1:], 0.3, rtol=1e-6)
    actual = rates(ScheduleConfig("constant", 0.3, warmup_steps=3), 4)
    np.testing.assert_allclose(actual[1:5], [0.1, 0.2, 0.3, 0.3], rtol=1e-6)
    actual = rates(ScheduleConfig("linear", 0.4, warmup_steps=0, min_lr_ratio=0), 4)
    np.testing.assert_allclose(actual[1:5], [0.3, 0.2, 0.1, 0], atol=1e-8)


def test_inverse_sqrt_matches_paper() -> None:
    """Vaswani et al. 2017, equation 3, with the base model's numbers."""
    numbers = (1, 100, 3999, 4000, 4001, 100_000)
    schedule = ScheduleConfig("inverse_sqrt", 0, warmup_steps=4000).make(steps=100_000, width=512)
    actual = np.asarray(schedule(jnp.array(numbers)))
    expected = [512**-0.5 * min(n**-0.5, n * 4000**-1.5) for n in numbers]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_inverse_sqrt_peaks() -> None:
    """A learning rate of 0 is the paper's; another one is the peak."""
    paper = rates(ScheduleConfig("inverse_sqrt", 0, warmup_steps=7), steps=30, width=49)
    other = rates(ScheduleConfig("inverse_sqrt", 0.5, warmup_steps=7), steps=30, width=49)
    assert paper[7] == pytest.approx(49**-0.5 * 7**-0.5, rel=1e-6)
    assert other[7] == pytest.approx(0.5, rel=1e-6)
    np.testing.assert_allclose(other[1:] / paper[1:], 0.5 * (49 * 7) ** 0.5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (3, 7), (50, 11), (313, 997)])
def test_rate_is_between_zero_and_peak(kind: Any, warmup: int, steps: int) -> None:
    if kind == "inverse_sqrt":
        warmup = max(1, warmup)
    config = ScheduleConfig(kind, 3e-3, warmup_steps=warmup, min_lr_ratio=0, decay_fraction=0.37)
    actual = rates(config, steps)[1:]
    assert (actual >= 0).all()
    assert (actual <= 3e-3 * (1 + 1e-6)).all()
    assert actual[0] > 0 or (steps, warmup) == (1, 0)
    if kind in ("cosine", "linear", "warmup_stable_decay") and steps > warmup:
        np.testing.assert_allclose(actual[steps - 1 :], 0, atol=1e-9)


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": -1.0},
        {"learning_rate": float("nan")},
        {"learning_rate": 0.0},
        {"warmup_steps": -3},
        {"warmup_steps": 0, "kind": "inverse_sqrt"},
        {"min_lr_ratio": 1.5},
        {"decay_fraction": -0.1},
    ],
)
def test_invalid_schedule_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"schedule.{next(iter(settings))} "):
        ScheduleConfig(**settings)
