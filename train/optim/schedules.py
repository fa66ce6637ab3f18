"""Learning rates as functions of the number of the update, the first being 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from transformer.validation import check_at_least

if TYPE_CHECKING:
    import jax

Schedule = Callable[["jax.Array"], "jax.Array"]


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """Warm-up from zero to the peak, then a decay."""

    kind: Literal["cosine", "linear", "inverse_sqrt", "warmup_stable_decay", "constant"] = "cosine"
    """What follows the warm-up: half a cosine or a line down to `final` at the last step; the
    inverse square root of the step (Vaswani et al. 2017, section 5.3); the peak, then a line down
    over the last `decay` steps; or the peak to the end."""
    learning_rate: float = 3e-4
    """The peak; for `inverse_sqrt`, 0 means the paper's: width^-0.5 * warmup^-0.5."""
    warmup_steps: int = 100
    """Steps until the peak."""
    min_lr_ratio: float = 0.1
    """What is left at the last step, as a share of the peak."""
    decay_fraction: float = 0.2
    """`warmup_stable_decay` alone: share of all steps over which the rate falls."""

    def __post_init__(self) -> None:
        check_at_least("schedule.learning_rate", self.learning_rate, 0)
        if self.learning_rate == 0 and self.kind != "inverse_sqrt":
            raise ValueError("schedule.learning_rate 0: learns nothing; give a positive rate")
        if self.warmup_steps < 0:
            raise ValueError(
                f"schedule.warmup_steps {self.warmup_steps}: is negative; give 0 or more steps"
            )
        if self.kind == "inverse_sqrt" and self.warmup_steps < 1:
            raise ValueError(
                "schedule.warmup_steps 0: inverse_sqrt divides by it; give 1 or more steps"
            )
        for name in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name} {getattr(self, name)}: give a share in [0, 1]")


def inverse_sqrt_schedule(width: int, warmup_steps: int) -> Schedule:
    """width^-0.5 * min(n^-0.5, n * warmup^-1.5) (Vaswani et al. 2017, equation 3)."""
    import jax.numpy as jnp

    def rate(n: jax.Array) -> jax.Array:
        n = jnp.asarray(n, jnp.float32)
        return width**-0.5 * jnp.minimum(n**-0.5, n * warmup_steps**-1.5)

    return rate


def make_schedule(config: ScheduleConfig, *, steps: int, width: int) -> Schedule:
    """The rate of update n, for n = 1 to `steps`."""
    import optax

    peak, warmup = config.learning_rate, config.warmup_steps
    if config.kind == "inverse_sqrt":
        paper = inverse_sqrt_schedule(width, warmup)
        factor = peak * (width * warmup) ** 0.5 if peak else 1.0
        return lambda n: factor * paper(n)
    left = max(1, steps - warmup)
    low = peak * config.min_lr_ratio
    if config.kind == "cosine":
        after = optax.cosine_decay_schedule(peak, left, alpha=config.min_lr_ratio)
    elif config.kind == "linear":
        after = optax.linear_schedule(peak, low, left)
    elif config.kind == "warmup_stable_decay":
        falling = max(1, min(left, round(steps * config.decay_fraction)))
        after = optax.linear_schedule(peak, low, falling, transition_begin=left - falling)
    else:
        after = optax.constant_schedule(peak)
    if not warmup:
        return lambda n: _positive(after(n))
    rise = optax.linear_schedule(0.0, peak, warmup)
    joined = optax.join_schedules([rise, after], [warmup])
    return lambda n: _positive(joined(n))


def _positive(rate: jax.Array) -> jax.Array:
    """In float32, where rounding may take the last rate of a line below zero."""
    import jax.numpy as jnp

    return jnp.maximum(jnp.asarray(rate, jnp.float32), 0.0)
