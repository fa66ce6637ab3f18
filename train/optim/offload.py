"""An update whose state waits in the memory of the host, and comes layer by layer.

The moments of AdamW weigh twice as much as the weights. If all of them came at once for the update,
the device would need room for them, and nothing were gained.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from train.checkpoint.tree_paths import named_leaves
from train.optim.base import Optimizer, apply_if_accepted, is_axes
from transformer.layers.logical_axes import LogicalAxes

NamedLeaves = dict[str, Any]
"""The arrays of a tree by name."""


def offload_state(
    optimizer: Optimizer,
    axes: Any,  # a tree of `Axes` like that of the parameters
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, `guarded`, its state in the memory of the host and all else on the device.

    Every optimizer treats stacked layers one by one, so this changes nothing of what it computes.
    What belongs to no stack (embeddings, the last norm) is updated in one piece.
    """

    def update(
        grads: Any, state: Any, params: Any = None, *, fine: jax.Array, **_: Any
    ) -> tuple[Any, Any]:
        before = named_leaves(state)
        directions, after = named_leaves(grads), dict(before)
        for layers, chosen in group_by_num_layers(axes, grads).items():
            own = (mask_leaves(tree, chosen) for tree in (axes, grads, params))
            move = update_whole if layers is None else update_by_layer
            found, moved = move(optimizer, before, fine, *own)
            directions |= named_leaves(found)
            after |= moved
        return unflatten_named(grads, directions), unflatten_named(state, after)

    return optax.GradientTransformationExtraArgs(optimizer.make(axes).init, update)


def update_whole(
    optimizer: Optimizer,
    state: NamedLeaves,
    accept_update: jax.Array,
    axes: Any,
    grads: Any,
    params: Any,
) -> tuple[Any, NamedLeaves]:
    """Directions for some of the parameters, and their part of the state one update on."""
    rule = apply_if_accepted(optimizer.make(axes))
    old = to_device_memory(unflatten_named(jax.eval_shape(rule.init, params), state))
    directions, new = rule.update(grads, old, params, fine=accept_update)
    return directions, to_host_memory(named_leaves(new))


def update_by_layer(
    optimizer: Optimizer,
    state: NamedLeaves,
    accept_update: jax.Array,
    axes: Any,
    grads: Any,
    params: Any,
) -> tuple[Any, NamedLeaves]:
    """The same for parameters of as many layers, of which one at a time has its state here.

    The loop writes each result to where it read what it is made of: nothing is there twice.
    """
    rule = apply_if_accepted(optimizer.make(jax.tree.map(single_layer_axes, axes, is_leaf=is_axes)))
    shapes = jax.eval_shape(lambda: rule.init(select_layer(0, params)))
    shared = {  # a number of updates belongs to no layer
        name: to_device_memory(state[name])
        for name, leaf in named_leaves(shapes).items()
        if leaf.shape == state[name].shape
    }
    stacked = {name: state[name] for name in named_leaves(shapes) if name not in shared}

    def layer(
        number: jax.Array, carry: tuple[Any, NamedLeaves, NamedLeaves]
    ) -> tuple[Any, NamedLeaves, NamedLeaves]:
        rows, moments, _ = carry
        old = unflatten_named(shapes, shared | to_device_memory(select_layer(number, moments)))
        directions, new = rule.update(
            select_layer(number, rows), old, select_layer(number, params), fine=accept_update
        )
        found = named_leaves(new)
        moments = set_layer(
            number, moments, to_host_memory({name: found[name] for name in stacked})
        )
        return set_layer(number, rows, directions), moments, {name: found[name] for name in shared}

    layers = len(jax.tree.leaves(grads)[0])
    directions, moments, new = jax.lax.fori_loop(0, layers, layer, (grads, stacked, shared))
    return directions, moments | to_host_memory(new)


def group_by_num_layers(axes: Any, grads: Any) -> dict[int | None, list[bool]]:
    """Which parameters have as many layers, by their number; None: are in no stack of layers."""
    pairs = zip(jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(grads), strict=True)
    counts = [len(leaf) if each.stack[:1] == ("layers",) else None for each, leaf in pairs]
    return {own: [count == own for count in counts] for own in counts}


def single_layer_axes(axes: LogicalAxes) -> LogicalAxes:
    """The axes of what is left of a weight when one of its layers is taken."""
    return LogicalAxes(axes.stack[1:], axes.inputs, axes.outputs)


def unflatten_named(tree: Any, leaves: NamedLeaves) -> Any:
    """A tree like this one of the leaves by name."""
    return jax.tree.unflatten(
        jax.tree.structure(tree), [leaves[name] for name in named_leaves(tree)]
    )


def mask_leaves(tree: Any, selected: Sequence[bool]) -> Any:
    """The tree with those of its leaves alone; the others are masked."""
    found, structure = jax.tree.flatten(tree, is_leaf=is_axes)
    pairs = zip(found, selected, strict=True)
    masked = [leaf if own else optax.MaskedNode() for leaf, own in pairs]
    return jax.tree.unflatten(structure, masked)


def select_layer(layer_index: Any, stacked: Any) -> Any:
    """One layer of each array."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer_index, keepdims=False), stacked
    )


def set_layer(layer_index: jax.Array, stacked: Any, layer: Any) -> Any:
    """The arrays with one layer replaced."""
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, layer_index, axis=0),
        stacked,
        layer,
    )


def to_device_memory(tree: Any) -> Any:
    """The arrays in the memory of the device."""
    return jax.device_put(tree, jax.memory.Space.Device)


def to_host_memory(tree: Any) -> Any:
    """The arrays in the memory of the host."""
    return jax.device_put(tree, jax.memory.Space.Host)
