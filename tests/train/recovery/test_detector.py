import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.support import light_compiler as light_compiler
from train.recovery.detector import (
    DETECTOR_METRICS,
    MIN_LOG_STD,
    NO_LIMIT,
    AnomalyDetector,
    detect_anomaly,
    robust_std,
)
from train.recovery.recovery_config import RecoveryConfig

CONFIG = RecoveryConfig()
QUIET = RecoveryConfig(window=11, warmup=7, threshold=3.0)


@functools.partial(jax.jit, static_argnums=0)
def watched(config: RecoveryConfig, steps: Any) -> tuple[AnomalyDetector, jax.Array]:
    """The detector at the end of (what is seen, lengths, scales or None), and every verdict."""

    def one(detector: AnomalyDetector, step: Any) -> tuple[AnomalyDetector, jax.Array]:
        what, length, scale = step
        verdict = detect_anomaly(detector, what, length, scale, config)
        assert verdict.detector is not None
        skipped = 1 - verdict.accept_update.astype(jnp.float32)
        return verdict.detector, jnp.stack(
            [skipped, *(verdict.metrics[name] for name in DETECTOR_METRICS)]
        )

    start = AnomalyDetector.create(config)
    assert start is not None
    return jax.lax.scan(one, start, steps)


def seen(
    losses: np.ndarray,  # [steps]
    norms: np.ndarray,  # [steps]
    scales: np.ndarray | None = None,  # [steps]
    lengths: np.ndarray | None = None,  # [steps]
    weights: np.ndarray | None = None,  # [steps], norms of the parameters
    config: RecoveryConfig = CONFIG,
) -> tuple[np.ndarray, AnomalyDetector]:  # [steps, 7], the verdicts
    """Return the detector's verdicts on the steps of a run."""
    lengths = np.full(len(losses), 128) if lengths is None else lengths
    weights = growing(len(losses)) if weights is None else weights
    steps = jax.tree.map(np.float32, (np.stack([losses, norms, weights], axis=-1), lengths, scales))
    detector, verdicts = watched(config, steps)
    return np.asarray(verdicts), detector


def a_run(steps: int, *, noise: float = 0.05, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A loss that falls as a power of the step, and norms that do so more slowly."""
    drawn, n = np.random.RandomState(seed), np.arange(1, steps + 1)
    losses = 7 * (1 + n / 20) ** -0.25 * np.exp(noise * drawn.randn(steps))
    norms = 2 * (1 + n / 20) ** -0.1 * np.exp(3 * noise * drawn.randn(steps))
    return losses, norms


def growing(steps: int) -> np.ndarray:  # [steps]
    """The norm of parameters that begin to learn: linear, and later as the root of the step."""
    n = np.arange(1, steps + 1)
    return 10 * np.sqrt(1 + 0.02 * n)


def make_detector(
    recent: np.ndarray,  # [2, W], of the weights the same as of the gradients
    lengths: Any = 128,  # [] or [W]
) -> AnomalyDetector:
    """With these steps in its window."""
    start = AnomalyDetector.create(QUIET)
    assert start is not None
    lengths = jnp.broadcast_to(jnp.int32(lengths), recent.shape[1:])
    recent = np.concatenate([recent, recent[1:]])
    return start.replace(log_history=jnp.asarray(recent, jnp.float32), lengths=lengths)


def skipped(verdicts: np.ndarray) -> list[int]:
    return np.flatnonzero(verdicts[:, 0]).tolist()


@pytest.mark.slow
def test_the_limits_by_hand() -> None:
    """The median of the logarithms, and three of their deviations: medians of |x - median|."""
    logs = np.array([0.0, 2.0, 1.0, 2.0, 0.0, 1.0, 5.0])
    recent = np.full((2, 11), np.nan, np.float32)
    recent[0, 4:], recent[1, 4:] = logs, 1
    detector = make_detector(recent)
    limits = np.log(detector.compute_limits(QUIET, 128).max_values)
    expected = [1 + 3 * 1.4826, 1 + 3 * MIN_LOG_STD[1], 1 + 3 * MIN_LOG_STD[2]]
    np.testing.assert_allclose(limits, expected, rtol=1e-5)
    recent[:, 4] = np.nan  # one less than there have to be
    unknown = make_detector(recent).compute_limits(QUIET, 128).max_values
    assert unknown.tolist() == [NO_LIMIT] * 3


@pytest.mark.slow
def test_a_length_has_limits_of_its_own() -> None:
    """Five batches of 8 tokens about 1, five of 16 about 5, one of 32."""
    logs = np.array([0.9, 5.0, 1.0, 4.6, 1.1, 5.4, 1.0, 5.0, 1.3, 5.2, 3.0])
    lengths = [8, 16, 8, 16, 8, 16, 8, 16, 8, 16, 32]
    detector = make_detector(np.stack([logs, logs]), lengths)
    apart = logs[:10] - np.tile([1.0, 5.0], 5)
    # Of no length do they fall, so there is no trend.
    spread = 1.4826 * np.median(np.abs(apart - np.median(apart)))
    assert spread < 1.4826 * 0.2  # the median of |0, 0.4, 0.4, 0, 0.2|
    for length, level, wider in ((8, 1.0, spread), (16, 5.0, 1.4826 * 0.2)):
        limits = np.log(detector.compute_limits(QUIET, length).max_values)
        np.testing.assert_allclose(
            limits, [level + 3 * max(wider, e) for e in MIN_LOG_STD], rtol=1e-5
        )
    everything = make_detector(np.stack([logs, logs])).compute_limits(QUIET, 128).max_values
    for unknown in (32, 64):  # too few of them
        assert detector.compute_limits(QUIET, unknown).max_values.tolist() == everything.tolist()


@pytest.mark.full
def test_a_spike_among_batches_of_several_lengths_is_noticed() -> None:
    """The spike is smaller than the difference between losses of long and short sentences."""
    losses, norms = a_run(1000)
    lengths = np.random.RandomState(2).choice([8, 16, 32], 1000)
    losses *= lengths / 8
    losses[980:985] *= 2
    verdicts, _ = seen(losses, norms, lengths=lengths)
    assert skipped(verdicts) == list(range(980, 985))
    blind, _ = seen(losses, norms)
    assert not skipped(blind)


def test_a_fall_is_no_variation_and_a_rise_is() -> None:
    line = jnp.arange(10, dtype=jnp.float32)
    assert float(robust_std(-line)) == pytest.approx(0, abs=1e-6)
    assert float(robust_std(line)) == pytest.approx(1.4826 * 2.5)


@pytest.mark.slow
def test_ordinary_runs_give_no_alarm() -> None:
    for noise in (0.001, 0.05, 0.3):
        for seed in range(2):
            verdicts, _ = seen(*a_run(1000, noise=noise, seed=seed))
            assert not skipped(verdicts)


@pytest.mark.slow
def test_noise_with_heavy_tails_is_no_trouble() -> None:
    """Student's t with three degrees of freedom: here and there an update, never some in a row."""
    drawn = np.random.RandomState(0)
    steps = 3000
    losses = 3 * np.exp(0.03 * drawn.standard_t(3, steps))
    norms = np.exp(0.2 * drawn.standard_t(3, steps))
    verdicts, _ = seen(losses, norms)
    assert len(skipped(verdicts)) < steps / 200
    assert verdicts[:, 1].max() < CONFIG.patience


@pytest.mark.parametrize("at", [60, 980])
@pytest.mark.parametrize("which", ["loss", "norm"])
def test_a_spike_is_noticed_at_once(at: int, which: str) -> None:
    losses, norms = a_run(1000)
    (losses if which == "loss" else norms)[at : at + 5] *= 10
    verdicts, _ = seen(losses, norms)
    assert skipped(verdicts) == list(range(at, at + 5))
    assert verdicts[at : at + 6, 1].tolist() == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize("bad", [1.3, np.inf, np.nan])
def test_weights_out_of_line_are_noticed_at_once(bad: float) -> None:
    """A flipped bit may belong to the embedding of a token that no batch has for a while."""
    losses, norms = a_run(600)
    weights = growing(600)
    weights[500:] *= bad
    verdicts, _ = seen(losses, norms, weights=weights)
    assert skipped(verdicts) == list(range(500, 600))
    assert verdicts[500, 1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("growth", [0.05, 0.005])
def test_weights_that_begin_to_grow_are_in_line(growth: float) -> None:
    """The learning rate rises from zero: first nothing moves, then all does."""
    losses, norms = a_run(1000)
    n = np.arange(1000)
    warm = np.where(n < 200, n * n / 400, n - 100)
    verdicts, _ = seen(losses, norms, weights=10 * np.sqrt(1 + growth * warm))
    assert not skipped(verdicts)


def test_what_is_out_of_line_does_not_become_usual() -> None:
    losses, norms = a_run(1000)
    losses[100:] *= 10
    verdicts, _ = seen(losses, norms)
    assert skipped(verdicts) == list(range(100, 1000))


def test_the_limit_of_the_median_by_hand() -> None:
    logs = np.array([0.0, 2.0, 1.0, 2.0, 0.0, 1.0, 5.0, 1.0, 1.0, 2.0, 1.0])
    detector = make_detector(np.stack([logs, logs]))
    limits = detector.compute_limits(QUIET, 128)
    assert float(limits.median_loss) == pytest.approx(np.e)
    assert float(limits.max_median_loss) == NO_LIMIT  # there was no full window before
    assert float(limits.lowest_median) == 1
    detector = detector.replace(lowest_median=jnp.float32(0.5))
    spread = float(robust_std(detector.log_history[0]))
    for rise, limit in ((0.1, np.exp(0.5 + spread)), (9.0, 10 * np.exp(0.5)), (0.0, NO_LIMIT)):
        limits = detector.compute_limits(dataclasses.replace(QUIET, loss_rise_tolerance=rise), 128)
        assert float(limits.max_median_loss) == pytest.approx(limit, rel=1e-5)
    assert float(limits.lowest_median) == 0.5


@pytest.mark.parametrize("slope", [0.001, 0.003, 1.0])
def test_a_loss_that_rises_too_slowly_for_a_spike_is_noticed(slope: float) -> None:
    """The loss ends 30% higher, more or less gradually; no single step is an outlier."""
    losses, norms = a_run(1000)
    losses[600:] = losses[600] * np.exp(np.minimum(slope * np.arange(400), 0.3))
    losses[600:] *= np.exp(0.05 * np.random.RandomState(1).randn(400))
    verdicts, _ = seen(losses, norms)
    first = skipped(verdicts)[0]
    assert losses[first] < verdicts[first, 2]  # no spike
    assert 600 < first < 660 + 0.2 / slope
    assert verdicts[first, 1] == 1
    undetected, _ = seen(losses, norms, config=dataclasses.replace(CONFIG, loss_rise_tolerance=0.0))
    assert not skipped(undetected)


def test_there_is_no_alarm_before_enough_is_known() -> None:
    losses, norms = a_run(100)
    losses[48:50] *= 100
    verdicts, _ = seen(losses, norms)
    assert not skipped(verdicts)
    assert (verdicts[:50, 2:5] == NO_LIMIT).all()
    assert (verdicts[50:, 2:5] < 1000).all()


@pytest.mark.parametrize(("loss", "norm"), [(np.nan, 1.0), (1.0, np.inf), (np.inf, np.nan)])
def test_what_is_not_finite_is_out_of_line_at_any_time(loss: float, norm: float) -> None:
    losses, norms = a_run(3)
    losses[0], norms[0] = loss, norm
    verdicts, detector = seen(losses, norms)
    assert skipped(verdicts) == [0]
    assert np.isfinite(np.asarray(detector.log_history)).sum() == 6


def test_gradients_that_overflow_are_excused_while_the_scale_can_be_lowered() -> None:
    losses, norms = a_run(6)
    norms[:] = np.inf
    losses[3] = np.nan
    scales = np.array([8, 4, 2, 1, 1, 1])
    verdicts, _ = seen(losses, norms, scales)
    assert skipped(verdicts) == list(range(6))
    assert verdicts[:, 1].tolist() == [0, 0, 0, 1, 2, 3]


def test_without_a_watch_only_what_is_not_finite_is_skipped() -> None:
    config = dataclasses.replace(CONFIG, window=0)
    assert AnomalyDetector.create(config) is None
    for norm, fine in ((1e30, True), (np.inf, False)):
        verdict = detect_anomaly(None, jnp.float32([1, norm, 10]), 128, None, config)
        assert bool(verdict.accept_update) is fine
        assert verdict.detector is None


def test_nothing_to_learn_from_is_in_line() -> None:
    """A batch without targets: its loss and its gradients are zero."""
    losses, norms = a_run(100)
    losses[60] = norms[60] = 0
    verdicts, detector = seen(losses, norms)
    assert not skipped(verdicts)
    assert np.isfinite(np.asarray(detector.log_history)).all()
