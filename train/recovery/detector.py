"""The watch over losses, gradients and weights: a pure function, part of the compiled step.

What it goes by is part of the state. So it sees every step without a word from the host, all
devices come to one verdict, and a run that is resumed judges as an unbroken one does.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from train.recovery.config import RecoveryConfig

MAD_TO_STD = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


MONITORED_METRICS = ("loss", "grad_norm", "param_norm")
"""The metrics of a step that are watched."""


MIN_LOG_STD = np.array([0.02, 0.2, 0.02], np.float32)
"""Standard deviations of their logarithms are taken to be this at least: a run that is very even is
not to be alarmed by a loss 2% higher."""


MIN_BATCHES_PER_LENGTH = 5
"""Batches of a length from which on a batch is compared with those of its own length."""


EPSILON = 1e-9


NO_LIMIT = float(np.finfo(np.float32).max)


DETECTOR_METRICS = (
    "strikes",
    *(f"{name}_limit" for name in MONITORED_METRICS),
    "usual_loss",
    "usual_loss_limit",
)
"""The metrics of a step that are the watch's own."""


class AnomalyDetector(struct.PyTreeNode):
    """What the last steps were like, and what was made of it."""

    log_history: jax.Array  # [3, W] float32, logarithms of `SEEN`, newest last; NaN: not yet
    lengths: jax.Array  # [W] int32, of their batches
    lowest_median: (
        jax.Array
    )  # float32, the lowest median of the losses of a full window, its logarithm
    consecutive_anomalies: jax.Array  # int32, steps out of line in a row, up to the last one
    lr_factor: jax.Array  # float32, what the learning rate is multiplied by

    @staticmethod
    def create(config: RecoveryConfig) -> "AnomalyDetector | None":
        """Before the first step; None if nothing is to be watched."""
        if not config.window:
            return None
        recent = jnp.full((len(MONITORED_METRICS), config.window), jnp.nan, jnp.float32)
        lengths = jnp.zeros(config.window, jnp.int32)
        return AnomalyDetector(recent, lengths, jnp.float32(jnp.inf), jnp.int32(0), jnp.float32(1))

    def compute_limits(self, config: RecoveryConfig, length: int) -> "AnomalyLimits":
        """What a batch of this length may have; anything while too few steps are known.

        Sentences that are batched by length have a loss that varies with it: each is compared with
        those of its own length where there are enough.
        """
        known = ~jnp.isnan(self.log_history[0])
        alike = known & (self.lengths == length)
        level, spread = median(self.log_history), robust_std(self.log_history)
        own_level, own_spread = jax.lax.cond(
            (alike == known).all() | (alike.sum() < MIN_BATCHES_PER_LENGTH),
            lambda: (level, spread),
            lambda: self.median_and_std_of_length(alike),
        )
        reach = config.threshold * jnp.maximum(own_spread, MIN_LOG_STD)
        enough = known.sum() >= config.warmup
        # A single deviation is eight times the standard error of the median of 100 steps.
        apart = jnp.maximum(
            spread[0],
            math.log1p(config.loss_rise_tolerance) if config.loss_rise_tolerance else jnp.inf,
        )
        return AnomalyLimits(
            max_values=jnp.where(enough, jnp.exp(own_level + reach), NO_LIMIT),
            median_loss=jnp.where(enough, jnp.exp(level[0]), 0),
            max_median_loss=jnp.where(
                enough, jnp.minimum(jnp.exp(self.lowest_median + apart), NO_LIMIT), 0
            ),
            lowest_median=jnp.where(
                known.all(), jnp.minimum(self.lowest_median, level[0]), self.lowest_median
            ),
        )

    def median_and_std_of_length(
        self, same_length: jax.Array
    ) -> tuple[jax.Array, jax.Array]:  # [W]; [3], [3]
        """The median of those, and the standard deviation about the medians of all lengths.

        Some lengths vary more than others; of too few batches theirs is not known.
        """
        own = jnp.where(same_length[None], self.log_history, jnp.nan)
        return median(own), jnp.maximum(robust_std(own), self.std_by_length())

    def std_by_length(self) -> jax.Array:  # [3]
        """The standard deviation about the median of those of the same length."""
        same = self.lengths[:, None] == self.lengths[None]
        level = median(jnp.where(same[None], self.log_history[:, None], jnp.nan))
        enough = jnp.sum(same & ~jnp.isnan(self.log_history[:1]), axis=-1) >= MIN_BATCHES_PER_LENGTH
        return robust_std(jnp.where(enough[None], self.log_history - level, jnp.nan))

    def append(self, values: jax.Array, length: int) -> "AnomalyDetector":  # [3]
        """One step on, with what was seen of a step that was in line."""
        newest = jnp.log(jnp.maximum(values, EPSILON))
        recent = jnp.concatenate([self.log_history[:, 1:], newest[:, None]], axis=1)
        lengths = jnp.concatenate([self.lengths[1:], jnp.full(1, length, jnp.int32)])
        return self.replace(log_history=recent, lengths=lengths)


class AnomalyLimits(NamedTuple):
    """What a step is held to."""

    max_values: jax.Array  # [3] the largest loss and norms that are in line
    median_loss: jax.Array  # the median loss of the window
    max_median_loss: jax.Array  # what that may be at most
    lowest_median: jax.Array  # logarithm of the lowest median of a full window, this one's with it


def median(
    values: jax.Array,  # [..., W], NaN: none
) -> jax.Array:  # [...]
    """The middle of the values that there are."""
    return jnp.nanmedian(values, axis=-1)


def robust_std(
    values: jax.Array,  # [..., W], NaN: none
) -> jax.Array:  # [...]
    """The standard deviation of values about their trend, by medians, if they fall.

    A loss that falls steeply would else seem to vary much, and hide a spike. If they rise, that
    counts as variation: so it takes more to be called a spike.
    """
    width = values.shape[-1]
    half = width // 2
    slope = (median(values[..., half:]) - median(values[..., :half])) / (width - half)
    falling = jnp.minimum(jnp.nan_to_num(slope), 0)
    trend = falling[..., None] * jax.lax.broadcasted_iota(
        values.dtype, values.shape, values.ndim - 1
    )
    level = values - trend
    return MAD_TO_STD * median(jnp.abs(level - median(level)[..., None]))


class Verdict(NamedTuple):
    """What is to be made of a step."""

    accept_update: jax.Array  # bool: its update is to be made
    detector: AnomalyDetector | None
    metrics: dict[str, jax.Array]  # float32 each, by the names in `REPORT`; none without a watch


def detect_anomaly(
    detector: AnomalyDetector | None,
    measured: jax.Array,  # [3]
    length: int,
    loss_scale: jax.Array | None,
    config: RecoveryConfig,
) -> Verdict:
    """Whether a step is in line, and the watch one step on.

    Args:
      watch: None: only what is not finite is out of line.
      seen: The mean loss and the global norms of the gradients and of the parameters before the
        update.
      length: T, the tokens of a row of the batch, padding included; of a translation, of the
        target.
      scale: The loss scale of float16. While it can be lowered, gradients that overflow are no
        trouble: the update is skipped, and that is all.
      config: How it is judged.
    """
    finite = jnp.isfinite(measured)
    if detector is None:
        return Verdict(finite.all(), None, {})
    limits = detector.compute_limits(config, length)
    in_line = finite & (measured <= limits.max_values)
    risen = limits.median_loss > limits.max_median_loss
    fine = in_line.all() & ~risen
    overflow = finite[0] & ~finite[1] & finite[2]
    excused = jnp.bool_(False) if loss_scale is None else overflow & (loss_scale > 1)
    strikes = jnp.where(fine, 0, detector.consecutive_anomalies + jnp.where(excused, 0, 1))
    # What is out of line does not count as what is usual.
    then = detector.append(measured, length)
    then = jax.tree.map(lambda new, old: jnp.where(fine, new, old), then, detector)
    values = (
        strikes.astype(jnp.float32),
        *limits.max_values,
        limits.median_loss,
        limits.max_median_loss,
    )
    report = dict(zip(DETECTOR_METRICS, values, strict=True))
    return Verdict(
        fine,
        then.replace(consecutive_anomalies=strikes, lowest_median=limits.lowest_median),
        report,
    )
