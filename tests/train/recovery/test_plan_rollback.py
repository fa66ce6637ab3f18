import dataclasses

import pytest

from train.detector import RecoveryConfig
from train.rollback import Anomaly, Rollback, choose_checkpoint, plan_rollback

CONFIG = RecoveryConfig(rollback_steps=100, skip_batches=200, max_rollbacks=3, lr_factor=0.5)
ANOMALY = Anomaly(first_step=1151, last_step=1153, next_batch=1353, reason="loss 9, more than 4")


def test_first_rollback_skips_data() -> None:
    actual = plan_rollback(ANOMALY, None, [500, 1000], CONFIG)
    assert actual == Rollback(
        first=1151, step=1153, checkpoint=1000, cursor=1553, rate=1.0, attempts=1
    )


def test_repeated_anomalies_lower_the_rate_until_the_limit() -> None:
    """The same anomaly again and again: the rate falls until `max_rollbacks` is reached."""
    before, result = None, []
    for n in range(4):
        anomaly = dataclasses.replace(ANOMALY, next_batch=2000 + 300 * n)
        rollback = plan_rollback(anomaly, before, [1000], CONFIG)
        if rollback is None:
            assert n == 3
            break
        result.append((rollback.attempts, rollback.rate, rollback.cursor))
        before = rollback
    assert result == [(1, 1.0, 2200), (2, 0.5, 2500), (3, 0.25, 2800)]


@pytest.mark.parametrize(("first", "attempts"), [(900, 2), (1253, 2), (1254, 1)])
def test_attempts_reset_after_passing_the_last_anomaly(first: int, attempts: int) -> None:
    before = Rollback(first=1151, step=1153, checkpoint=1000, cursor=1553, rate=0.5, attempts=1)
    anomaly = Anomaly(first, first + 2, 5000, "")
    result = plan_rollback(anomaly, before, [500], CONFIG)
    assert result is not None
    assert result.attempts == attempts
    assert result.rate == (0.25 if attempts == 2 else 0.5)  # the lowered rate stays


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ([500, 1000, 1052], 1000),
        ([1051], 1051),
        ([1052, 1100], 1052),
        ([1100, 1150], 1100),
        ([1150, 1151], 1150),
        ([1151, 1200], 0),
        ([], 0),
        ([0], 0),
    ],
)
def test_checkpoint_to_roll_back_to(checkpoints: list[int], expected: int) -> None:
    """The checkpoint of step s precedes step s + 1: before an anomaly at 1151, 1150 is valid."""
    assert choose_checkpoint(1151, checkpoints, 100) == expected
