"""All optimizers by `kind`, registration of your own, and the optimizer of a training step.

Optimizers treat parameters by their logical axes, never by `ndim`: weight decay acts on matrices
only, and each layer of a stacked parameter is updated as if it were a parameter of its own.
"""

from typing import TYPE_CHECKING, Any, Literal, TypeVar

from train.optim.adafactor import Adafactor
from train.optim.adamw_8bit import AdamW8bit
from train.optim.elementwise import Adam, AdamW, Lion, Sgd
from train.optim.muon import Muon
from train.optim.optimizer import Optimizer
from transformer.registration import check_kind_is_free, check_registration

if TYPE_CHECKING:
    import optax

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
    kind = getattr(optimizer, "kind", None)
    check_registration("optimizer", kind, optimizer)
    check_kind_is_free("optimizer", str(kind), optimizer, OPTIMIZERS.get(str(kind)))
    OPTIMIZERS[str(kind)] = optimizer
    return optimizer


def make_optimizer(
    config: Optimizer,
    axes: Any,  # tree of `LogicalAxes` with the structure of the parameters
) -> "optax.GradientTransformation":
    """Return the transformation of gradients into directions of descent."""
    return config.make(axes)


def make_step_optimizer(
    config: Optimizer,
    axes: Any,  # tree of `LogicalAxes` with the structure of the parameters
    placement: Literal["device", "host"] = "device",
) -> "optax.GradientTransformationExtraArgs":
    """Return the optimizer of a training step. Its `update` takes `accept_update`.

    Args:
      config: Hyperparameters.
      axes: Logical axes of the parameters.
      placement: Memory that holds the optimizer state between steps.
    """
    if placement == "host":
        from train.optim.offload import offload_state

        return offload_state(config, axes)
    from train.step import apply_if_accepted  # loads JAX

    return apply_if_accepted(make_optimizer(config, axes))
