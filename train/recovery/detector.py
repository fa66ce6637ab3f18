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

NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


SEEN = ("loss", "grad_norm", "param_norm")
"""The metrics of a step that are watched."""


LEAST = np.array([0.02, 0.2, 0.02], np.float32)
"""Standard deviations of their logarithms are taken to be this at least: a run that is very even is
not to be alarmed by a loss 2% higher."""


FEW = 5
"""Batches of a length from which on a batch is compared with those of its own length."""


TINY = 1e-9


NO_LIMIT = float(np.finfo(np.float32).max)


REPORT = ("strikes", *(f"{name}_limit" for name in SEEN), "usual_loss", "usual_loss_limit")
"""The metrics of a step that are the watch's own."""


class Watch(struct.PyTreeNode):
    """What the last steps were like, and what was made of it."""

    recent: jax.Array  # [3, W] float32, logarithms of `SEEN`, newest last; NaN: not yet
    lengths: jax.Array  # [W] int32, of their batches
    lowest: jax.Array  # float32, the lowest median of the losses of a full window, its logarithm
    strikes: jax.Array  # int32, steps out of line in a row, up to the last one
    rate: jax.Array  # float32, what the learning rate is multiplied by

    @staticmethod
    def start(config: RecoveryConfig) -> "Watch | None":
        """Before the first step; None if nothing is to be watched."""
        if not config.window:
            return None
        recent = jnp.full((len(SEEN), config.window), jnp.nan, jnp.float32)
        lengths = jnp.zeros(config.window, jnp.int32)
        return Watch(recent, lengths, jnp.float32(jnp.inf), jnp.int32(0), jnp.float32(1))

    def limits(self, config: RecoveryConfig, length: int) -> "Limits":
        """What a batch of this length may have; anything while too few steps are known.

        Sentences that are batched by length have a loss that varies with it: each is compared with
        those of its own length where there are enough.
        """
        known = ~jnp.isnan(self.recent[0])
        alike = known & (self.lengths == length)
        level, spread = median(self.recent), deviation(self.recent)
        own_level, own_spread = jax.lax.cond(
            (alike == known).all() | (alike.sum() < FEW),
            lambda: (level, spread),
            lambda: self.of_length(alike),
        )
        reach = config.threshold * jnp.maximum(own_spread, LEAST)
        enough = known.sum() >= config.warmup
        # A single deviation is eight times the standard error of the median of 100 steps.
        apart = jnp.maximum(spread[0], math.log1p(config.rise) if config.rise else jnp.inf)
        return Limits(
            seen=jnp.where(enough, jnp.exp(own_level + reach), NO_LIMIT),
            usual=jnp.where(enough, jnp.exp(level[0]), 0),
            usual_limit=jnp.where(enough, jnp.minimum(jnp.exp(self.lowest + apart), NO_LIMIT), 0),
            lowest=jnp.where(known.all(), jnp.minimum(self.lowest, level[0]), self.lowest),
        )

    def of_length(self, alike: jax.Array) -> tuple[jax.Array, jax.Array]:  # [W]; [3], [3]
        """The median of those, and the standard deviation about the medians of all lengths.

        Some lengths vary more than others; of too few batches theirs is not known.
        """
        own = jnp.where(alike[None], self.recent, jnp.nan)
        return median(own), jnp.maximum(deviation(own), self.spread_by_length())

    def spread_by_length(self) -> jax.Array:  # [3]
        """The standard deviation about the median of those of the same length."""
        same = self.lengths[:, None] == self.lengths[None]
        level = median(jnp.where(same[None], self.recent[:, None], jnp.nan))
        enough = jnp.sum(same & ~jnp.isnan(self.recent[:1]), axis=-1) >= FEW
        return deviation(jnp.where(enough[None], self.recent - level, jnp.nan))

    def then(self, seen: jax.Array, length: int) -> "Watch":  # [3]
        """One step on, with what was seen of a step that was in line."""
        newest = jnp.log(jnp.maximum(seen, TINY))
        recent = jnp.concatenate([self.recent[:, 1:], newest[:, None]], axis=1)
        lengths = jnp.concatenate([self.lengths[1:], jnp.full(1, length, jnp.int32)])
        return self.replace(recent=recent, lengths=lengths)


class Limits(NamedTuple):
    """What a step is held to."""

    seen: jax.Array  # [3] the largest loss and norms that are in line
    usual: jax.Array  # the median loss of the window
    usual_limit: jax.Array  # what that may be at most
    lowest: jax.Array  # logarithm of the lowest median of a full window, this one's with it


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
    seen: jax.Array,  # [3]
    length: int,
    scale: jax.Array | None,
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
    finite = jnp.isfinite(seen)
    if watch is None:
        return Verdict(finite.all(), None, {})
    limits = watch.limits(config, length)
    in_line = finite & (seen <= limits.seen)
    risen = limits.usual > limits.usual_limit
    fine = in_line.all() & ~risen
    overflow = finite[0] & ~finite[1] & finite[2]
    excused = jnp.bool_(False) if scale is None else overflow & (scale > 1)
    strikes = jnp.where(fine, 0, watch.strikes + jnp.where(excused, 0, 1))
    # What is out of line does not count as what is usual.
    then = watch.then(seen, length)
    then = jax.tree.map(lambda new, old: jnp.where(fine, new, old), then, watch)
    values = strikes.astype(jnp.float32), *limits.seen, limits.usual, limits.usual_limit
    report = dict(zip(REPORT, values, strict=True))
    return Verdict(fine, then.replace(strikes=strikes, lowest=limits.lowest), report)
