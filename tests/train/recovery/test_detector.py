import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.support import light_compiler as light_compiler
from train.detector import (
    DETECTOR_METRICS,
    MIN_LOG_STD,
    NO_LIMIT,
    AnomalyDetector,
    RecoveryConfig,
    detect_anomaly,
    robust_std,
)

CONFIG = RecoveryConfig()
QUIET = RecoveryConfig(window=11, warmup=7, threshold=3.0)


@functools.partial(jax.jit, static_argnums=0)
def run_detector(config: RecoveryConfig, steps: Any) -> tuple[AnomalyDetector, jax.Array]:
    """Return the detector after (observations, lengths, scales or None), and every verdict."""

    def one(detector: AnomalyDetector, step: Any) -> tuple[AnomalyDetector, jax.Array]:
        what, length, scale = step
        verdict = detect_anomaly(detector, what, length, scale, config)
        assert verdict.detector is not None
        skipped_steps = 1 - verdict.accept_update.astype(jnp.float32)
        return verdict.detector, jnp.stack(
            [skipped_steps, *(verdict.metrics[name] for name in DETECTOR_METRICS)]
        )

    start = AnomalyDetector.create(config)
    assert start is not None
    return jax.lax.scan(one, start, steps)


def verdicts_on(
    losses: np.ndarray,  # [steps]
    norms: np.ndarray,  # [steps]
    scales: np.ndarray | None = None,  # [steps]
    lengths: np.ndarray | None = None,  # [steps]
    weights: np.ndarray | None = None,  # [steps], parameter norms
    config: RecoveryConfig = CONFIG,
) -> tuple[np.ndarray, AnomalyDetector]:  # [steps, 7], the verdicts
    """Return the detector's verdicts on the steps of a run."""
    lengths = np.full(len(losses), 128) if lengths is None else lengths
    weights = growing_norms(len(losses)) if weights is None else weights
    steps = jax.tree.map(np.float32, (np.stack([losses, norms, weights], axis=-1), lengths, scales))
    detector, verdicts = run_detector(config, steps)
    return np.asarray(verdicts), detector


def make_run(steps: int, *, noise: float = 0.05, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return a loss that falls as a power of the step, and norms that fall more slowly."""
    drawn, n = np.random.RandomState(seed), np.arange(1, steps + 1)
    losses = 7 * (1 + n / 20) ** -0.25 * np.exp(noise * drawn.randn(steps))
    norms = 2 * (1 + n / 20) ** -0.1 * np.exp(3 * noise * drawn.randn(steps))
    return losses, norms


LONG = 400
"""Steps of a run whose window is filled. Runs of one length share a program."""


def growing_norms(steps: int) -> np.ndarray:  # [steps]
    """Return parameter norms that grow linearly at first, then as the square root of the step."""
    n = np.arange(1, steps + 1)
    return 10 * np.sqrt(1 + 0.02 * n)


def make_detector(
    recent: np.ndarray,  # [2, W]; parameter norms equal gradient norms
    lengths: Any = 128,  # [] or [W]
) -> AnomalyDetector:
    """Return a detector with these steps in its window."""
    start = AnomalyDetector.create(QUIET)
    assert start is not None
    lengths = jnp.asarray(np.full(recent.shape[1:], lengths, np.int32))
    recent = np.concatenate([recent, recent[1:]])
    return start.replace(log_history=jnp.asarray(recent, jnp.float32), lengths=lengths)


limits_of = jax.jit(AnomalyDetector.compute_limits, static_argnums=1)

std_of = jax.jit(robust_std)


def skipped_steps(verdicts: np.ndarray) -> list[int]:
    return np.flatnonzero(verdicts[:, 0]).tolist()


def test_limits_by_hand() -> None:
    """The median of the logarithms, plus three deviations: medians of |x - median|."""
    logs = np.array([0.0, 2.0, 1.0, 2.0, 0.0, 1.0, 5.0])
    recent = np.full((2, 11), np.nan, np.float32)
    recent[0, 4:], recent[1, 4:] = logs, 1
    detector = make_detector(recent)
    limits = np.log(limits_of(detector, QUIET, 128).max_values)
    expected = [1 + 3 * 1.4826, 1 + 3 * MIN_LOG_STD[1], 1 + 3 * MIN_LOG_STD[2]]
    np.testing.assert_allclose(limits, expected, rtol=1e-5)
    recent[:, 4] = np.nan  # one fewer than required
    unknown = limits_of(make_detector(recent), QUIET, 128).max_values
    assert unknown.tolist() == [NO_LIMIT] * 3


def test_limits_per_length() -> None:
    """Five batches of 8 tokens with losses about 1, five of 16 about 5, one of 32."""
    logs = np.array([0.9, 5.0, 1.0, 4.6, 1.1, 5.4, 1.0, 5.0, 1.3, 5.2, 3.0])
    lengths = [8, 16, 8, 16, 8, 16, 8, 16, 8, 16, 32]
    detector = make_detector(np.stack([logs, logs]), lengths)
    apart = logs[:10] - np.tile([1.0, 5.0], 5)
    # They fall for no length, so there is no trend.
    spread = 1.4826 * np.median(np.abs(apart - np.median(apart)))
    assert spread < 1.4826 * 0.2  # the median of |0, 0.4, 0.4, 0, 0.2|
    # The parameter norm, whatever the length: about the last one, with the spread of its steps.
    steps = np.diff(np.float32(logs), prepend=np.float32(np.nan))
    weights = logs[-1] + 3 * float(std_of(steps))
    for length, level, wider in ((8, 1.0, spread), (16, 5.0, 1.4826 * 0.2)):
        limits = np.log(limits_of(detector, QUIET, length).max_values)
        expected = [*(level + 3 * max(wider, e) for e in MIN_LOG_STD[:2]), weights]
        np.testing.assert_allclose(limits, expected, rtol=1e-5)
    everything = limits_of(make_detector(np.stack([logs, logs])), QUIET, 128).max_values
    for unknown in (32, 64):  # too few of them
        assert limits_of(detector, QUIET, unknown).max_values.tolist() == everything.tolist()


@pytest.mark.full
def test_spike_among_batches_of_several_lengths_is_detected() -> None:
    """The spike is smaller than the difference between losses of long and short sentences."""
    losses, norms = make_run(1000)
    lengths = np.random.RandomState(2).choice([8, 16, 32], 1000)
    losses *= lengths / 8
    losses[980:985] *= 2
    verdicts, _ = verdicts_on(losses, norms, lengths=lengths)
    assert skipped_steps(verdicts) == list(range(980, 985))
    blind, _ = verdicts_on(losses, norms)
    assert not skipped_steps(blind)


def test_falling_trend_is_removed_and_rising_trend_is_not() -> None:
    line = np.arange(10, dtype=np.float32)
    assert float(std_of(-line)) == pytest.approx(0, abs=1e-6)
    assert float(std_of(line)) == pytest.approx(1.4826 * 2.5)


def test_no_false_alarms_in_ordinary_runs() -> None:
    for noise in (0.001, 0.05, 0.3):
        for seed in range(2):
            verdicts, _ = verdicts_on(*make_run(1000, noise=noise, seed=seed))
            assert not skipped_steps(verdicts)


@pytest.mark.parametrize("at", [60, LONG - 20])
@pytest.mark.parametrize("which", ["loss", "norm"])
def test_spike_is_detected_immediately(at: int, which: str) -> None:
    losses, norms = make_run(LONG)
    (losses if which == "loss" else norms)[at : at + 5] *= 10
    verdicts, _ = verdicts_on(losses, norms)
    assert skipped_steps(verdicts) == list(range(at, at + 5))
    assert verdicts[at : at + 6, 1].tolist() == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize("bad", [1.3, np.inf, np.nan])
def test_outlier_parameter_norms_are_detected_immediately(bad: float) -> None:
    """A flipped bit may be in the embedding of a token that no batch contains for a while."""
    losses, norms = make_run(LONG)
    weights = growing_norms(LONG)
    weights[300:] *= bad
    verdicts, _ = verdicts_on(losses, norms, weights=weights)
    assert skipped_steps(verdicts) == list(range(300, LONG))
    assert verdicts[300, 1] == 1


@pytest.mark.parametrize(
    ("growth", "warmup", "power"),
    [
        (0.05, 200, 1),
        (0.005, 200, 1),
        # As the first steps of `wikitext2`, where Muon's updates point in one direction.
        (0.05, 100, 2),
    ],
    ids=["fast", "slow", "aligned updates"],
)
def test_growing_parameter_norms_are_normal(growth: float, warmup: int, power: int) -> None:
    """During the learning rate's warmup, first nothing moves, then everything does."""
    losses, norms = make_run(1000)
    n = np.arange(1000)
    warm = np.where(n < warmup, n * n / (2 * warmup), n - warmup / 2)
    weights = 10 * np.sqrt(1 + (growth * warm) ** power)
    verdicts, _ = verdicts_on(losses, norms, weights=weights)
    assert not skipped_steps(verdicts)


def test_anomalies_do_not_enter_the_window() -> None:
    losses, norms = make_run(LONG)
    losses[100:] *= 10
    verdicts, _ = verdicts_on(losses, norms)
    assert skipped_steps(verdicts) == list(range(100, LONG))


def test_limit_of_the_median_by_hand() -> None:
    logs = np.array([0.0, 2.0, 1.0, 2.0, 0.0, 1.0, 5.0, 1.0, 1.0, 2.0, 1.0])
    detector = make_detector(np.stack([logs, logs]))
    limits = limits_of(detector, QUIET, 128)
    assert float(limits.median_loss) == pytest.approx(np.e)
    assert float(limits.max_median_loss) == NO_LIMIT  # there is no earlier full window
    assert float(limits.lowest_median) == 1
    detector = detector.replace(lowest_median=jnp.float32(0.5))
    spread = float(std_of(np.asarray(detector.log_history)[0]))
    for rise, limit in ((0.1, np.exp(0.5 + spread)), (9.0, 10 * np.exp(0.5)), (0.0, NO_LIMIT)):
        limits = limits_of(detector, dataclasses.replace(QUIET, loss_rise_tolerance=rise), 128)
        assert float(limits.max_median_loss) == pytest.approx(limit, rel=1e-5)
    assert float(limits.lowest_median) == 0.5


@pytest.mark.parametrize("slope", [0.001, 0.003, 1.0])
def test_slow_rise_of_the_loss_is_detected(slope: float) -> None:
    """The loss ends 30% higher, more or less gradually; no single step is an outlier."""
    losses, norms = make_run(1000)
    losses[600:] = losses[600] * np.exp(np.minimum(slope * np.arange(400), 0.3))
    losses[600:] *= np.exp(0.05 * np.random.RandomState(1).randn(400))
    verdicts, _ = verdicts_on(losses, norms)
    first = skipped_steps(verdicts)[0]
    assert losses[first] < verdicts[first, 2]  # no single spike
    assert 600 < first < 660 + 0.2 / slope
    assert verdicts[first, 1] == 1
    undetected, _ = verdicts_on(
        losses, norms, config=dataclasses.replace(CONFIG, loss_rise_tolerance=0.0)
    )
    assert not skipped_steps(undetected)


def test_no_alarm_during_warmup() -> None:
    losses, norms = make_run(100)
    losses[48:50] *= 100
    verdicts, _ = verdicts_on(losses, norms)
    assert not skipped_steps(verdicts)
    assert (verdicts[:50, 2:5] == NO_LIMIT).all()
    assert (verdicts[50:, 2:5] < 1000).all()


@pytest.mark.parametrize(("loss", "norm"), [(np.nan, 1.0), (1.0, np.inf), (np.inf, np.nan)])
def test_nonfinite_values_are_always_anomalies(loss: float, norm: float) -> None:
    losses, norms = make_run(3)
    losses[0], norms[0] = loss, norm
    verdicts, detector = verdicts_on(losses, norms)
    assert skipped_steps(verdicts) == [0]
    assert np.isfinite(np.asarray(detector.log_history)).sum() == 6


def test_gradient_overflow_is_not_an_anomaly_while_the_loss_scale_can_fall() -> None:
    losses, norms = make_run(6)
    norms[:] = np.inf
    losses[3] = np.nan
    scales = np.array([8, 4, 2, 1, 1, 1])
    verdicts, _ = verdicts_on(losses, norms, scales)
    assert skipped_steps(verdicts) == list(range(6))
    assert verdicts[:, 1].tolist() == [0, 0, 0, 1, 2, 3]


def test_disabled_detector_skips_only_nonfinite_updates() -> None:
    config = dataclasses.replace(CONFIG, window=0)
    assert AnomalyDetector.create(config) is None
    for norm, fine in ((1e30, True), (np.inf, False)):
        verdict = detect_anomaly(None, jnp.float32([1, norm, 10]), 128, None, config)
        assert bool(verdict.accept_update) is fine
        assert verdict.detector is None


def test_batch_without_targets_is_normal() -> None:
    """A batch without targets: its loss and its gradients are zero."""
    losses, norms = make_run(100)
    losses[60] = norms[60] = 0
    verdicts, detector = verdicts_on(losses, norms)
    assert not skipped_steps(verdicts)
    assert np.isfinite(np.asarray(detector.log_history)).all()


@pytest.mark.parametrize(("window", "warmup"), [(2, 2), (3, 1), (100, 1)])
def test_smallest_windows(window: int, warmup: int) -> None:
    """One known step has no differences, and a window of two has one."""
    config = RecoveryConfig(window=window, warmup=warmup)
    losses, norms = make_run(20)
    losses[12] = np.nan
    verdicts, _ = verdicts_on(losses, norms, config=config)
    assert skipped_steps(verdicts) == [12]


def test_steep_fall_hides_no_spike_in_a_partly_filled_window() -> None:
    """The halves of the window hold unequal numbers of steps after the warm-up."""
    noise = 0.01 * np.random.RandomState(0).randn(100)
    losses = np.exp(3 - 0.02 * np.arange(100) + noise)
    _, detector = verdicts_on(losses[:60], np.ones(60))
    limit = limits_of(detector, CONFIG, 128).max_values[0]
    level = np.median(losses[:60])
    assert float(limit) / level == pytest.approx(np.exp(8 * 0.02), rel=0.02)
