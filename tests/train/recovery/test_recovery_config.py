from typing import Any

import pytest

from train.detector import RecoveryConfig
from train.errors import UsageError


@pytest.mark.parametrize(
    "settings",
    [
        {"window": -1},
        {"window": 1, "warmup": 1},
        {"warmup": 101},
        {"warmup": 0},
        {"threshold": 0.0},
        {"loss_rise_tolerance": -0.1},
        {"patience": 0},
        {"rollback_steps": -1},
        {"max_rollbacks": -1},
        {"lr_factor": 0.0},
        {"lr_factor": 1.5},
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any]) -> None:
    name = next(iter(settings))
    with pytest.raises(UsageError, match=f"recovery.{name} {settings[name]}: "):
        RecoveryConfig(**settings)


def test_disabled_detector_has_no_warmup() -> None:
    assert RecoveryConfig(window=0).warmup
