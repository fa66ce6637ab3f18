"""Detect anomalous losses and norms: a pure function inside the compiled training step.

The detector's history is part of the training state. Three things follow: it sees every step
without a transfer to the host, all devices reach the same verdict, and a resumed run judges
exactly as an uninterrupted one does.

Statistics are robust (medians and MAD, the median absolute deviation), because the window may hold
outliers. They are taken of logarithms, so that a threshold means a ratio at every scale of loss.

Shapes: W is the window size. The leading 3 is `MONITORED_METRICS`.
"""

import dataclasses
import functools
import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from train.errors import UsageError
from train.settings import Settings
from transformer.validation import Bounds, Mark, NonNegativeFloat, NonNegativeInt, PositiveInt

MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution divided by its MAD. One outlier among 100 steps moves
a mean and a standard deviation, and so hides the next one; up to half of the window may be outliers
before a median and a MAD follow them."""

MONITORED_METRICS = ("loss", "grad_norm", "param_norm")
"""Metrics of a step that the detector compares with the window."""

PARAM_NORM = MONITORED_METRICS.index("param_norm")

MIN_LOG_STD = np.array([0.02, 0.2, 0.02], np.float32)
"""Lower bounds of the standard deviations of the logarithms. A very smooth run would otherwise
raise an alarm for a loss 2% higher."""

MIN_BATCHES_PER_LENGTH = 5
"""Batches of one length in the window from which on a batch is compared with these alone."""

EPSILON = 1e-9
NO_LIMIT = float(np.finfo(np.float32).max)

DETECTOR_METRICS = (
    "consecutive_anomalies",
    *(f"{name}_limit" for name in MONITORED_METRICS),
    "median_loss",
    "median_loss_limit",
)
"""Metrics that the detector adds to those of a step."""


@dataclasses.dataclass(frozen=True)
class RecoveryConfig(Settings, part="recovery"):
    """Response to loss spikes and non-finite updates.

    1. The update of an anomalous step is skipped.
    2. If anomalies persist, the run rolls back to an earlier checkpoint and continues with other
       batches (PaLM, section 5.1).
    3. If the anomaly returns, the next rollback also lowers the learning rate (OPT, section 2.5).
    4. After `max_rollbacks` rollbacks for the same anomaly, the run stops with an error.
    """

    window: NonNegativeInt = 100
    """Number of recent steps that a step is compared with. 0 turns detection off: only non-finite
    updates are skipped."""
    warmup: Annotated[NonNegativeInt, Mark.RESUMABLE] = 50
    """Steps that the window must hold before detection starts."""
    threshold: Annotated[float, Bounds(above=0), Mark.RESUMABLE] = 8.0
    """Anomaly threshold in MAD-scaled standard deviations of the logarithm: for the loss and the
    gradient norm above the median of the window, for the parameter norm above the last one, in
    deviations of its steps. Non-finite values are always anomalies."""
    loss_rise_tolerance: Annotated[NonNegativeFloat, Mark.RESUMABLE] = 0.1
    """Largest relative rise of the window's median loss above its lowest value so far. A larger
    rise, of at least one standard deviation, causes a rollback at once. It finds a divergence that
    is too slow to be a spike. 0 turns it off."""
    patience: Annotated[PositiveInt, Mark.RESUMABLE] = 3
    """Consecutive anomalies that cause a rollback."""
    rollback_steps: Annotated[int, Bounds(0, 10**9), Mark.RESUMABLE] = 100
    """Steps between the first anomaly and the checkpoint to roll back to, if one is kept."""
    skip_batches: Annotated[int, Bounds(0, 10**8), Mark.RESUMABLE] = 200
    """Batches to skip after the anomaly. The batches since the checkpoint are skipped too."""
    max_rollbacks: Annotated[NonNegativeInt, Mark.RESUMABLE] = 3
    """Rollbacks for one anomaly before the run stops with an error."""
    lr_factor: Annotated[float, Bounds(above=0, maximum=1), Mark.RESUMABLE] = 0.5
    """Factor on the learning rate for the rest of the run, applied from the second rollback for
    one anomaly on, in (0, 1]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # One value has no deviation to measure the next one by.
        if self.window == 1:
            raise UsageError(
                "recovery.window 1: is too short to find an anomaly; give 2 or more, or 0 for no "
                "detection"
            )
        # More than the window can hold would never be reached, and detection never start.
        if self.window and not 1 <= self.warmup <= self.window:
            raise UsageError(
                f"recovery.warmup {self.warmup}: give from 1 to recovery.window {self.window}"
            )


class AnomalyDetector(struct.PyTreeNode):
    """Recent history of a run, part of the training state."""

    # NaN marks a step that has not happened: shapes must be static, and a count of valid entries
    # would need a mask in every statistic.
    log_history: jax.Array  # [3, W] float32, newest last
    lengths: jax.Array  # [W] int32, T of the batches in the history
    lowest_median: jax.Array  # float32, lowest median log loss of a full window so far
    consecutive_anomalies: jax.Array  # int32, up to and including the last step
    lr_factor: jax.Array  # float32, factor on the learning rate, lowered by rollbacks

    @staticmethod
    def create(config: RecoveryConfig) -> "AnomalyDetector | None":
        """Return the detector before the first step; None if detection is off."""
        if not config.window:
            return None
        history = jnp.full((len(MONITORED_METRICS), config.window), jnp.nan, jnp.float32)
        lengths = jnp.zeros(config.window, jnp.int32)
        return AnomalyDetector(history, lengths, jnp.float32(jnp.inf), jnp.int32(0), jnp.float32(1))

    def compute_limits(self, config: RecoveryConfig, length: int) -> "AnomalyLimits":
        """Return the limits for a batch of `length` tokens a row; none during the warm-up.

        When sentences are batched by length, the loss depends on the length. A batch is then
        compared with batches of its own length, once there are enough of them.
        """
        # One program serves the warm-up and the rest of the run: medians skip missing steps.
        known = ~jnp.isnan(self.log_history[0])
        same_length = known & (self.lengths == length)
        level, spread = median(self.log_history), robust_std(self.log_history)
        # `cond` skips the statistics by length, which cost O(W^2), where all lengths are equal.
        own_level, own_spread = jax.lax.cond(
            (same_length == known).all() | (same_length.sum() < MIN_BATCHES_PER_LENGTH),
            lambda: (level, spread),
            lambda: self.statistics_of_length(same_length),
        )
        # Weights change by small steps, but within a window they may grow by any factor, the faster
        # the higher the learning rate is warmed up. So their norm is compared with the last one,
        # and the spread is that of its steps.
        norms = self.log_history[PARAM_NORM]
        own_level = own_level.at[PARAM_NORM].set(norms[-1])
        own_spread = own_spread.at[PARAM_NORM].set(robust_std(jnp.diff(norms, prepend=jnp.nan)))
        # In logarithms the limit is a factor: exp(8 * 0.02) = 1.17 times the median loss, at least.
        reach = config.threshold * jnp.maximum(own_spread, MIN_LOG_STD)
        # Before that, the limits are infinite in effect and the median checks compare 0 with 0.
        enough = known.sum() >= config.warmup
        # A rise below one standard deviation is not counted: that is eight times the standard
        # error of the median of 100 steps, so noise does not reach it.
        tolerance = config.loss_rise_tolerance
        rise = jnp.maximum(spread[0], math.log1p(tolerance) if tolerance else jnp.inf)
        lowest = jnp.minimum(self.lowest_median, level[0])
        max_median = jnp.minimum(jnp.exp(self.lowest_median + rise), NO_LIMIT)
        return AnomalyLimits(
            max_values=jnp.where(enough, jnp.exp(own_level + reach), NO_LIMIT),
            median_loss=jnp.where(enough, jnp.exp(level[0]), 0),
            max_median_loss=jnp.where(enough, max_median, 0),
            # Only full windows count: the median of the first few steps is still falling.
            lowest_median=jnp.where(known.all(), lowest, self.lowest_median),
        )

    def statistics_of_length(
        self,
        same_length: jax.Array,  # [W] bool
    ) -> tuple[jax.Array, jax.Array]:  # [3], [3]
        """Return the median and the standard deviation of the batches of one length.

        The deviation is at least that of all batches about the medians of their own lengths: a
        few batches of one length may agree by chance.
        """
        own = jnp.where(same_length[None], self.log_history, jnp.nan)
        # [W, W]: row i marks the batches of the length of batch i.
        same = self.lengths[:, None] == self.lengths[None]
        level = median(jnp.where(same[None], self.log_history[:, None], jnp.nan))
        batches = jnp.sum(same & ~jnp.isnan(self.log_history[:1]), axis=-1)
        enough = batches >= MIN_BATCHES_PER_LENGTH
        about_own = jnp.where(enough[None], self.log_history - level, jnp.nan)
        return median(own), jnp.maximum(robust_std(own), robust_std(about_own))

    def append(self, values: jax.Array, length: int) -> "AnomalyDetector":  # values [3]
        """Return the detector with a normal step at the end of its history."""
        # A loss of 0 is possible on a tiny data set, and has no logarithm.
        # The window is shifted, not written at a rotating index: the trend needs its order.
        newest = jnp.log(jnp.maximum(values, EPSILON))
        history = jnp.concatenate([self.log_history[:, 1:], newest[:, None]], axis=1)
        lengths = jnp.concatenate([self.lengths[1:], jnp.full(1, length, jnp.int32)])
        return self.replace(log_history=history, lengths=lengths)


class AnomalyLimits(NamedTuple):
    """Limits that a step must not exceed."""

    max_values: jax.Array  # [3] largest normal loss, gradient norm and parameter norm
    median_loss: jax.Array  # median loss of the window
    max_median_loss: jax.Array  # largest normal median loss
    lowest_median: jax.Array  # lowest median log loss so far, this window's included


median = functools.partial(jnp.nanmedian, axis=-1)
"""Median over W of the values that are not missing (NaN): [..., W] -> [...]."""


def robust_std(
    values: jax.Array,  # [..., W], NaN: missing
) -> jax.Array:  # [...]
    """Return the MAD-scaled standard deviation of values about their falling trend; 0 for none.

    A loss that falls steeply would otherwise seem to vary much, and hide a spike. A rising trend
    is not removed: it counts as variation, so a rise does not lower its own threshold.
    """
    half = values.shape[-1] // 2
    steps = jax.lax.broadcasted_iota(values.dtype, values.shape, values.ndim - 1)
    known = jnp.where(jnp.isnan(values), jnp.nan, steps)
    # Slope by the medians of both halves: one outlier does not turn it.
    rise, run = (median(x[..., half:]) - median(x[..., :half]) for x in (values, known))
    # The slope is NaN as long as one half of the window is empty.
    falling = jnp.minimum(jnp.nan_to_num(rise / run), 0)
    detrended = values - falling[..., None] * steps
    return jnp.nan_to_num(MAD_TO_STD * median(jnp.abs(detrended - median(detrended)[..., None])))


class Verdict(NamedTuple):
    """Outcome of `detect_anomaly`."""

    accept_update: jax.Array  # bool
    detector: AnomalyDetector | None
    metrics: dict[str, jax.Array]  # float32 by `DETECTOR_METRICS`; empty without a detector


def detect_anomaly(
    detector: AnomalyDetector | None,  # before the step; None: only non-finite values are anomalies
    measured: jax.Array,  # [3] loss, gradient norm, and parameter norm before the update
    length: int,  # T of a row of the batch, with padding; of the target, for a translation
    loss_scale: jax.Array | None,  # of float16 training
    config: RecoveryConfig,
) -> Verdict:
    """Decide whether to accept the update of a step, and return the detector after the step.

    As long as the loss scale can be lowered, an overflow of the gradients is expected: the update
    is skipped, and the step is not counted as an anomaly.
    """
    finite = jnp.isfinite(measured)
    if detector is None:
        return Verdict(finite.all(), None, {})
    limits = detector.compute_limits(config, length)
    # NaN compares as False, and infinity may equal an infinite limit, so `finite` is needed too.
    in_range = finite & (measured <= limits.max_values)
    risen = limits.median_loss > limits.max_median_loss
    accept = in_range.all() & ~risen
    # An overflow leaves loss and weights finite. A NaN loss is never excused.
    overflow = finite[0] & ~finite[1] & finite[2]
    excused = jnp.bool_(False) if loss_scale is None else overflow & (loss_scale > 1)
    count = jnp.where(accept, 0, detector.consecutive_anomalies + jnp.where(excused, 0, 1))
    # Anomalies stay out of the history: a long spike must not become the new normal.
    after = detector.append(measured, length)
    after = jax.tree.map(lambda new, old: jnp.where(accept, new, old), after, detector)
    medians = limits.median_loss, limits.max_median_loss
    values = (count.astype(jnp.float32), *limits.max_values, *medians)
    metrics = dict(zip(DETECTOR_METRICS, values, strict=True))
    # These two change also at an anomaly, so they are set after the selection.
    after = after.replace(consecutive_anomalies=count, lowest_median=limits.lowest_median)
    return Verdict(accept, after, metrics)
