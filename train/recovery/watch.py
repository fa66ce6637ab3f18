"""The watch over losses and gradient norms: a pure function, part of the compiled step.

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

NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""

LEAST = np.array([0.02, 0.1], np.float32)
"""Standard deviations of the logarithms of loss and norm are taken to be this at least: a run that
is very even is not to be alarmed by a loss 2% higher."""

TINY = 1e-9
NO_LIMIT = float(np.finfo(np.float32).max)

REPORT = ("strikes", "loss_limit", "grad_norm_limit", "usual_loss", "usual_loss_limit")
"""The metrics of a step that are the watch's own."""


class Watch(struct.PyTreeNode):
    """What the last steps were like, and what was made of it."""

    recent: jax.Array  # [2, W] float32, logarithms of loss and norm, newest last; NaN: not yet
    lowest: jax.Array  # float32, the lowest median of the losses of a full window, its logarithm
    strikes: jax.Array  # int32, steps out of line in a row, up to the last one
    rate: jax.Array  # float32, what the learning rate is multiplied by

    @staticmethod
    def start(config: RecoveryConfig) -> "Watch | None":
        """Before the first step; None if nothing is to be watched."""
        if not config.window:
            return None
        recent = jnp.full((2, config.window), jnp.nan, jnp.float32)
        return Watch(recent, jnp.float32(jnp.inf), jnp.int32(0), jnp.float32(1))

    def limits(self, config: RecoveryConfig) -> jax.Array:  # [2]
        """The largest loss and norm that are in line; any while too few steps are known."""
        reach = config.threshold * jnp.maximum(deviation(self.recent), LEAST)
        known = jnp.sum(~jnp.isnan(self.recent[0]))
        return jnp.where(known >= config.warmup, jnp.exp(median(self.recent) + reach), NO_LIMIT)

    def usual(self, config: RecoveryConfig) -> jax.Array:  # [2]
        """The median loss of the window, and what it may be at most.

        A single deviation is eight times the standard error of the median of 100 steps.
        """
        losses = self.recent[0]
        usual = jnp.exp(jnp.nan_to_num(median(losses), nan=-jnp.inf))
        apart = jnp.maximum(deviation(losses), math.log1p(config.rise) if config.rise else jnp.inf)
        limit = jnp.exp(jnp.nan_to_num(self.lowest + apart, nan=jnp.inf))
        return jnp.stack([usual, jnp.minimum(limit, NO_LIMIT)])

    def then(self, seen: jax.Array) -> "Watch":  # [2]
        """One step on, with the loss and the norm of a step that was in line."""
        newest = jnp.log(jnp.maximum(seen, TINY))
        recent = jnp.concatenate([self.recent[:, 1:], newest[:, None]], axis=1)
        losses = recent[0]
        full = ~jnp.isnan(losses).any()
        lowest = jnp.where(full, jnp.minimum(self.lowest, median(losses)), self.lowest)
        return self.replace(recent=recent, lowest=lowest)


def median(
    values: jax.Array,  # [..., W], NaN: none
) -> jax.Array:  # [...]
    """The middle of the values that there are."""
    return jnp.nanmedian(values, axis=-1)


def deviation(
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
    return NORMAL * median(jnp.abs(level - median(level)[..., None]))


class Verdict(NamedTuple):
    """What is to be made of a step."""

    fine: jax.Array  # bool: its update is to be made
    watch: Watch | None
    report: dict[str, jax.Array]  # float32 each, by the names in `REPORT`; none without a watch


def judge(
    watch: Watch | None,
    loss: jax.Array,
    norm: jax.Array,
    scale: jax.Array | None,
    config: RecoveryConfig,
) -> Verdict:
    """Whether a step is in line, and the watch one step on.

    Args:
      watch: None: only what is not finite is out of line.
      loss: The mean loss.
      norm: The global norm of the gradients.
      scale: The loss scale of float16. While it can be lowered, gradients that overflow are no
        trouble: the update is skipped, and that is all.
      config: How it is judged.
    """
    seen = jnp.stack([loss, norm])
    finite = jnp.isfinite(seen)
    if watch is None:
        return Verdict(finite.all(), None, {})
    limits, (usual, usual_limit) = watch.limits(config), watch.usual(config)
    risen = usual > usual_limit
    fine = (finite & (seen <= limits)).all() & ~risen
    excused = jnp.bool_(False) if scale is None else finite[0] & ~finite[1] & (scale > 1)
    strikes = jnp.where(fine, 0, watch.strikes + jnp.where(excused, 0, 1))
    # What has risen is in the weights: no update that is skipped helps.
    strikes = jnp.where(risen, jnp.maximum(strikes, config.patience), strikes)
    # What is out of line does not count as what is usual.
    then = jax.tree.map(lambda new, old: jnp.where(fine, new, old), watch.then(seen), watch)
    values = (strikes.astype(jnp.float32), *limits, usual, usual_limit)
    return Verdict(fine, then.replace(strikes=strikes), dict(zip(REPORT, values, strict=True)))
