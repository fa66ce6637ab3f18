from typing import Any

import pytest

from train.recovery.recovery_config import RecoveryConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": -1}, "recovery.window -1: give 0 or more"),
        ({"window": 1, "warmup": 1}, "recovery.window 1: is too short to find an anomaly"),
        ({"warmup": 101}, "recovery.warmup 101: give from 1 to recovery.window 100"),
        ({"warmup": 0}, "recovery.warmup 0: give from 1 to"),
        ({"threshold": 0.0}, "recovery.threshold 0.0: give more than 0"),
        ({"loss_rise_tolerance": -0.1}, "recovery.loss_rise_tolerance -0.1: give 0 or more"),
        ({"patience": 0}, "recovery.patience 0: give 1 or more"),
        ({"rollback_steps": -1}, "recovery.rollback_steps -1: give 0 or more"),
        ({"max_rollbacks": -1}, "recovery.max_rollbacks -1: give 0 or more"),
        ({"lr_factor": 0.0}, r"recovery.lr_factor 0.0: give a factor in \(0, 1\]"),
        ({"lr_factor": 1.5}, r"recovery.lr_factor 1.5: give a factor in \(0, 1\]"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecoveryConfig(**settings)


def test_disabled_detector_has_no_warmup() -> None:
    assert RecoveryConfig(window=0).warmup
