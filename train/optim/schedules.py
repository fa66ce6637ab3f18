"""Learning-rate schedules: optax schedules of the number of the update, which begins at 1.

`ScheduleConfig` holds the shipped shapes. A schedule of your own is a `LearningRateSchedule` with
settings of its own, registered by `register_schedule`.
"""

import abc
import dataclasses
from typing import Annotated, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import optax

from train.errors import UsageError
from train.settings import Settings
from transformer.registration import check_kind_is_free, check_registration
from transformer.validation import Bounds, Mark, NonNegativeFloat, NonNegativeInt

Shape = Literal["cosine", "linear", "inverse_sqrt", "warmup_stable_decay", "constant"]


@dataclasses.dataclass(frozen=True)
class LearningRateSchedule(Settings, abc.ABC, part="schedule"):
    """Interface of the settings of a schedule. Those of your own have a `kind: ClassVar[str]`."""

    @abc.abstractmethod
    def make(self, *, steps: int, width: int) -> optax.Schedule:
        """Return the learning rate of update n, for n = 1 to `steps`; traced under `jit`.

        Args:
          steps: Updates of the whole run.
          width: Model width D.
        """


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(LearningRateSchedule):
    """Linear warm-up from zero to the peak, followed by a decay."""

    kind: Shape = "cosine"
    """Shape after the warm-up. cosine, linear: decay until the last step. inverse_sqrt: decay with
    the inverse square root of the step (Vaswani et al. 2017, section 5.3). warmup_stable_decay:
    constant, then linear decay at the end. constant: no decay."""
    learning_rate: Annotated[NonNegativeFloat, Mark.COMMON] = 3e-4
    """Peak learning rate. With `inverse_sqrt`, 0 means the paper's d_model^-0.5 *
    warmup_steps^-0.5."""
    warmup_steps: Annotated[NonNegativeInt, Mark.COMMON] = 100
    """Steps of the warm-up."""
    min_lr_ratio: Annotated[float, Bounds(0, 1)] = 0.1
    """Learning rate of the last step, as a fraction of the peak (cosine, linear,
    warmup_stable_decay)."""
    decay_fraction: Annotated[float, Bounds(0, 1)] = 0.2
    """Length of the final decay, as a fraction of all steps (warmup_stable_decay only)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate == 0 and self.kind != "inverse_sqrt":
            raise UsageError("schedule.learning_rate 0: changes no weight; give a positive rate")
        if self.kind == "inverse_sqrt" and self.warmup_steps == 0:
            raise UsageError(
                "schedule.warmup_steps 0: inverse_sqrt needs a warm-up; give 1 or more"
            )

    def make(self, *, steps: int, width: int) -> optax.Schedule:
        """Return the learning rate of update n, for n = 1 to `steps`.

        Rounding may take the last rate of a decay to zero below it (see `train.step`).
        """
        peak, warmup = self.learning_rate, self.warmup_steps
        if self.kind == "inverse_sqrt":
            return _inverse_sqrt_schedule(peak, warmup, width)
        steps_left = max(1, steps - warmup)
        last = peak * self.min_lr_ratio
        if self.kind == "cosine":
            decay = optax.cosine_decay_schedule(peak, steps_left, alpha=self.min_lr_ratio)
        elif self.kind == "linear":
            decay = optax.linear_schedule(peak, last, steps_left)
        elif self.kind == "warmup_stable_decay":
            decay_steps = max(1, min(steps_left, round(steps * self.decay_fraction)))
            begin = steps_left - decay_steps
            decay = optax.linear_schedule(peak, last, decay_steps, transition_begin=begin)
        else:
            decay = optax.constant_schedule(peak)
        if not warmup:
            return decay
        rise = optax.linear_schedule(0.0, peak, warmup)
        return optax.join_schedules([rise, decay], [warmup])


def _inverse_sqrt_schedule(peak: float, warmup_steps: int, width: int) -> optax.Schedule:
    """Return D^-0.5 * min(n^-0.5, n * warmup_steps^-1.5) (Vaswani et al. 2017, equation 3).

    With a `peak` above 0, it is scaled to it. The paper's own is (D * warmup_steps)^-0.5.
    """
    factor = peak * (width * warmup_steps) ** 0.5 if peak else 1.0

    def learning_rate(n: jax.Array) -> jax.Array:
        n = jnp.asarray(n, jnp.float32)
        return factor * (width**-0.5 * jnp.minimum(n**-0.5, n * warmup_steps**-1.5))

    return learning_rate


SCHEDULES: dict[str, type[LearningRateSchedule]] = dict.fromkeys(get_args(Shape), ScheduleConfig)
"""Schedule classes by `kind`, the value of `--schedule.kind`."""

ScheduleClass = TypeVar("ScheduleClass", bound=type[LearningRateSchedule])
"""Type variable: a class of settings, which a decorator returns as it is."""


def register_schedule(schedule: ScheduleClass) -> ScheduleClass:
    """Register a schedule under its `kind`. A class decorator, above `dataclasses.dataclass`.

    Raises:
      ValueError: It cannot be saved, or its kind belongs to another schedule.
    """
    kind = getattr(schedule, "kind", None)
    check_registration("schedule", kind, schedule)
    check_kind_is_free("schedule", str(kind), schedule, SCHEDULES.get(str(kind)))
    SCHEDULES[str(kind)] = schedule
    return schedule
