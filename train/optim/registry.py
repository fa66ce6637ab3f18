"""Optimizers by name: directions of descent, to be multiplied by the learning rate.

Which weights are matrices, and which axes are those of one layer, is told by the names of their
axes: weight decay acts on matrices alone, and layers that are stacked are treated one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from train.optim.adafactor import Adafactor
from train.optim.adam import Adam, AdamW
from train.optim.adamw_8bit import AdamW8bit
from train.optim.lion import Lion
from train.optim.muon import Muon
from train.optim.sgd import Sgd

if TYPE_CHECKING:
    import optax

OptimizerConfig = Sgd | Adam | AdamW | AdamW8bit | Adafactor | Lion | Muon


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    each.kind: each for each in (Sgd, Adam, AdamW, AdamW8bit, Adafactor, Lion, Muon)
}
"""By `kind`."""


def make_optimizer(
    config: OptimizerConfig,
    axes: Any,  # a tree of `Axes` like that of the parameters
) -> optax.GradientTransformation:
    """Gradients -> directions: update = -learning rate * direction. Clipping is the step's."""
    return config.make(axes)


def make_step_optimizer(
    config: OptimizerConfig,
    axes: Any,  # a tree of `Axes` like that of the parameters
    placement: Literal["device", "host"] = "device",
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a step: told whether the step is fine, with its state in either memory."""
    from train.optim.base import apply_if_accepted
    from train.optim.offload import offload_state

    if placement == "host":
        return offload_state(config, axes)
    return apply_if_accepted(make_optimizer(config, axes))
