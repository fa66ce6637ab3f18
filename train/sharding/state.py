"""Where weights and the optimizer's state lie."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.sharding.rules import logical_to_sharding
from transformer.weights import LogicalAxes


def parameter_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """The layout of each parameter, from the names of its axes."""
    return jax.tree.map(
        lambda a, s: logical_to_sharding(mesh, a.names, s.shape),
        axes,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, LogicalAxes),
    )


def optimizer_state_shardings(state: Any, shapes: Any, shardings: Any, rest: NamedSharding) -> Any:
    """The layout of an optimizer's state.

    What belongs to a parameter, by its path, lies like it: all of it if it has its shape; if not
    (means over rows, scales of blocks), the axes that it shares in order, where they divide. The
    rest (counts, coefficients) lies as `operands_and_attributes` says.
    """
    known = {
        _names(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True
        )
    }

    def layout(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = _names(path)
        ends = (names[start:] for start in range(len(names)))
        found = next((known[end] for end in ends if end in known), None)
        if found is None:
            return rest
        shape, sharding = found
        return sharding if leaf.shape == shape else _fitted(sharding, leaf.shape)

    return jax.tree_util.tree_map_with_path(layout, state)


def _fitted(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The layout of an array of another shape: axis by axis, where the parts divide it."""
    parts = lambda axes: math.prod(sharding.mesh.shape[axis] for axis in axes or ())  # noqa: E731
    spec = [
        axes if size % parts((axes,) if isinstance(axes, str) else axes) == 0 else None
        for axes, size in zip(sharding.spec, shape, strict=False)
    ]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
