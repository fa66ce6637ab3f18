"""Interface of an optimizer, and what optimizers share."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from train.settings import Settings
from transformer.layers.logical_axes import LogicalAxes
from transformer.validation import NonNegativeFloat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Settings, abc.ABC, part="optimizer"):
    """Hyperparameters of an optimizer, with the optax transformation that they make."""

    kind: ClassVar[str]
    handles_rejection: ClassVar[bool] = False
    """True if the update of `make` takes `accept_update`, as `make_rejectable` explains."""

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


def is_hidden_matrix(axes: LogicalAxes) -> bool:
    """Return True for linear maps between hidden vectors.

    Not for tables (of tokens, positions, token types) and a map from input features.
    """
    inputs = {"vocab", "positions", "types", "features"}
    return axes.is_matrix and not inputs.intersection(axes.names)


def scale_hidden_matrices(factor: float, axes: Any) -> list[optax.GradientTransformation]:
    """Return what multiplies the directions of hidden matrices by a factor: nothing for 1.

    An identity in the chain would be a part of the optimizer state, and so of every checkpoint.
    """
    if factor == 1:
        return []
    return [optax.masked(optax.scale(factor), jax.tree.map(is_hidden_matrix, axes))]


def add_weight_decay(weight_decay: float, axes: Any) -> optax.GradientTransformation:
    """Return weight decay of the matrices: decoupled at the end of a chain, L2 at its start."""
    is_matrix = jax.tree.map(lambda leaf: leaf.is_matrix, axes)
    return optax.add_decayed_weights(weight_decay, mask=is_matrix)


def map_parameters(
    function: Callable[..., tuple[Any, ...]],
    axes: Any,  # tree of `LogicalAxes`
    *trees: Any,
) -> tuple[Any, ...]:
    """Apply a function of (axes, leaf of each tree) to all parameters; return a tree per result."""
    structure: Any = jax.tree.structure(axes)
    results = map(function, *(structure.flatten_up_to(tree) for tree in (axes, *trees)))
    return tuple(map(structure.unflatten, zip(*results, strict=True)))


def make_rejectable(optimizer: Optimizer, axes: Any) -> optax.GradientTransformationExtraArgs:
    """Return the transformation of `make`, with a boolean argument `accept_update` of `update`.

    If it is False, the new state is the old one, and the directions are to be ignored.
    """
    transformation = optimizer.make(axes)
    if optimizer.handles_rejection:
        return optax.with_extra_args_support(transformation)
    return apply_if_accepted(transformation)


def apply_if_accepted(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with `accept_update`: the new state is selected after its update."""

    def update(
        grads: Any, state: Any, params: Any = None, *, accept_update: jax.Array, **_: Any
    ) -> tuple[Any, Any]:
        directions, new_state = optimizer.update(grads, state, params)
        return directions, tree_where(accept_update, new_state, state)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def tree_where(condition: jax.Array | bool, new: Any, old: Any) -> Any:
    """Return `jnp.where(condition, new, old)` for every leaf.

    Not `lax.cond`: XLA fuses this selection into the update, which reads both values anyway. The
    branches of a `cond` are programs of their own, which nothing around them is fused with.
    """
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
