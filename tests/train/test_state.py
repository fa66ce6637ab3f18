""" """

from typing import Any

import jax.numpy as jnp
import pytest

from train.errors import UsageError
from train.state import LossScale, LossScaleConfig

CONFIG = LossScaleConfig(init_scale=8.0, growth_interval=3, max_scale=32.0)


def after(*finite: bool, start: LossScale | None = None) -> tuple[float, int]:
    """Return the scale and the number of good steps after steps with or without overflow."""
    scale = start or LossScale.create(CONFIG)
    for well in finite:
        scale = scale.update(jnp.bool_(well), CONFIG)
    assert scale.scale.dtype == jnp.float32
    assert scale.good_steps.dtype == jnp.int32
    return float(scale.scale), int(scale.good_steps)


def test_overflow_halves_scale_and_resets_count() -> None:
    assert after() == (8, 0)
    assert after(False) == (4, 0)
    assert after(True, True, False) == (4, 0)
    assert after(True, True, False, True) == (4, 1)
    assert after(False, False, True) == (2, 1)


def test_scale_doubles_after_growth_interval() -> None:
    assert after(True, True) == (8, 2)
    assert after(True, True, True) == (16, 0)
    assert after(*[True] * 5) == (16, 2)
    assert after(*[True] * 6) == (32, 0)


def test_scale_stays_within_limits() -> None:
    assert after(*[True] * 12) == (32, 0)
    assert after(*[False] * 9) == (1, 0)


def test_initial_scale() -> None:
    assert float(LossScale.create(LossScaleConfig()).scale) == 2**15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": 0.5}, "loss_scale.init_scale 0.5: give 1 or more"),
        ({"max_scale": 8.0}, "give at most loss_scale.max_scale 8.0"),
        ({"growth_interval": 0}, "loss_scale.growth_interval 0: give 1 or more"),
    ],
)
def test_invalid_loss_scale_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LossScaleConfig(**settings)
