"""What all optimizers have in common.

An update that may turn out not to be made.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from transformer.validation import check_at_least, check_fraction

if TYPE_CHECKING:
    import optax

import jax
import jax.numpy as jnp
import optax

DECAY_RATE_FIELDS = ("beta1", "beta2", "momentum")
"""Settings that say how much of an average a step leaves as it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(abc.ABC):
    """What turns gradients into directions. Other numbers than shares are 0 or more."""

    kind: ClassVar[str]

    max_grad_norm: float = 1.0
    """Largest global norm of the gradients; beyond it they are scaled down. 0: no limit."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = f"optimizer.{field.name}", getattr(self, field.name)
            if field.name in DECAY_RATE_FIELDS:
                check_fraction(name, value)
            elif not isinstance(value, str):
                check_at_least(name, value, 0)

    @abc.abstractmethod
    def make(
        self,
        axes: Any,  # a tree of `Axes` like that of the parameters
    ) -> optax.GradientTransformation:
        """Gradients -> directions: update = -learning rate * direction. Clipping is the step's."""


def matrix_mask(axes: Any) -> Any:
    """A tree of booleans: which parameters are linear maps."""
    import jax

    return jax.tree.map(lambda leaf: leaf.is_matrix, axes, is_leaf=is_axes)


def add_weight_decay(weight_decay: float, axes: Any) -> optax.GradientTransformation:
    """Weight decay of the matrices: decoupled where it is the last of a chain, L2 as the first."""
    import optax

    return optax.add_decayed_weights(weight_decay, mask=matrix_mask(axes))


def is_axes(leaf: Any) -> bool:
    """Whether this is a leaf of a tree of `Axes`."""
    from transformer.layers.logical_axes import LogicalAxes

    return isinstance(leaf, LogicalAxes)


def pick_entry(tree: Any, axes: Any, index: int) -> Any:
    """Of a tree of tuples, one for each parameter, the tree of their entries at `index`."""
    import jax

    return jax.tree.map(lambda _, each: each[index], axes, tree, is_leaf=is_axes)


def apply_if_accepted(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The same, whose `update` is told whether all is `accept_update`: if not, its state stays as it is."""

    def update(
        grads: Any, state: Any, params: Any = None, *, fine: jax.Array, **_: Any
    ) -> tuple[Any, Any]:
        directions, new = optimizer.update(grads, state, params)
        return directions, tree_where(fine, new, state)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def tree_where(condition: jax.Array, new: Any, old: Any) -> Any:
    """The new tree if all is fine, else the old one."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
