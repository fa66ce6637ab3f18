"""Interface of an optimizer, and the functions of trees of axes that optimizers share.

Optimizer classes are configurations, read before JAX is loaded: functions import it themselves.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from train.settings import Settings
from transformer.validation import NonNegativeFloat

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Settings, abc.ABC, part="optimizer"):
    """Hyperparameters of an optimizer, with the optax transformation that they make."""

    kind: ClassVar[str]

    max_grad_norm: NonNegativeFloat = 1.0
    """Largest global norm of the gradients; larger gradients are scaled down to it. 0: no limit."""

    @abc.abstractmethod
    def make(
        self,
        axes: Any,  # tree of `LogicalAxes` with the structure of the parameters
    ) -> optax.GradientTransformation:
        """Return the transformation of gradients into directions.

        The step applies `update = -learning_rate * direction`, and clips gradients beforehand.
        """


def is_axes(leaf: Any) -> bool:
    """Return True for a leaf of a tree of `LogicalAxes`."""
    from transformer.layers.logical_axes import LogicalAxes

    return isinstance(leaf, LogicalAxes)


def matrix_mask(axes: Any) -> Any:
    """Return a tree of booleans: True for parameters that are linear maps."""
    import jax

    return jax.tree.map(lambda leaf: leaf.is_matrix, axes, is_leaf=is_axes)


def is_hidden_matrix(axes: Any) -> bool:
    """Return True for linear maps between hidden vectors.

    Not for tables (of tokens, positions, token types) and a map from input features.
    """
    inputs = {"vocab", "positions", "types", "features"}
    return bool(axes.is_matrix and not inputs.intersection(axes.names))


def scale_hidden_matrices(factor: float, axes: Any) -> list[optax.GradientTransformation]:
    """Return what multiplies the directions of hidden matrices by a factor: nothing for 1.

    An identity in the chain would be a part of the optimizer state, and so of every checkpoint.
    """
    import jax
    import optax

    if factor == 1:
        return []
    mask = jax.tree.map(is_hidden_matrix, axes, is_leaf=is_axes)
    return [optax.masked(optax.scale(factor), mask)]


def add_weight_decay(weight_decay: float, axes: Any) -> optax.GradientTransformation:
    """Return weight decay of the matrices: decoupled at the end of a chain, L2 at its start."""
    import optax

    return optax.add_decayed_weights(weight_decay, mask=matrix_mask(axes))


def pick_entry(tree: Any, axes: Any, index: int) -> Any:
    """Return the tree of the entries at `index`, given a tree with a tuple for each parameter."""
    import jax

    return jax.tree.map(lambda _, each: each[index], axes, tree, is_leaf=is_axes)
