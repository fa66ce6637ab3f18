"""All optimizers by `kind`, registration of your own, and the optimizer of a training step.

Optimizers treat parameters by their logical axes, never by `ndim`: weight decay acts on matrices
only, and each layer of a stacked parameter is updated as if it were a parameter of its own.
"""

from typing import Any, Literal, TypeVar

import optax

from train.optim.adafactor import Adafactor
from train.optim.adamw_8bit import AdamW8bit
from train.optim.elementwise import Adam, AdamW, Lion, Sgd
from train.optim.muon import Muon
from train.optim.offload import offload_state
from train.optim.optimizer import Optimizer, make_rejectable
from transformer.registration import check_kind_is_free, check_registration

OPTIMIZERS: dict[str, type[Optimizer]] = {
    each.kind: each for each in (Sgd, Adam, AdamW, AdamW8bit, Adafactor, Lion, Muon)
}
"""Optimizer classes by `kind`, the value of `--optimizer.kind`."""

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])
"""Type variable: a class of settings, which a decorator returns as it is."""


def register_optimizer(optimizer: OptimizerClass) -> OptimizerClass:
    """Register an optimizer under its `kind`. A class decorator, above `dataclasses.dataclass`.

    Raises:
      ValueError: It cannot be saved, or its kind belongs to another optimizer.
    """
    check_registration("optimizer", getattr(optimizer, "kind", None), optimizer)
    check_kind_is_free("optimizer", optimizer.kind, optimizer, OPTIMIZERS.get(optimizer.kind))
    OPTIMIZERS[optimizer.kind] = optimizer
    return optimizer


def make_step_optimizer(
    config: Optimizer,
    axes: Any,  # tree of `LogicalAxes` with the structure of the parameters
    placement: Literal["device", "host"] = "device",
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of a training step. Its `update` takes `accept_update`.

    Args:
      config: Hyperparameters.
      axes: Logical axes of the parameters.
      placement: Memory that holds the optimizer state between steps.
    """
    if placement == "host":
        return offload_state(config, axes)
    return make_rejectable(config, axes)
