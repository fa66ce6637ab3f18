"""Optimizer state in host memory, fetched for the update one layer at a time.

The moments of AdamW take twice the memory of the float32 weights. Fetching all of them at once for
the update would need that memory on the device after all, so a loop over the layers fetches,
updates and stores the state of one layer at a time.

Trees are handled as dicts from path to array (`NamedLeaves`): which leaves of an optax state belong
to a layer is only visible in the leaf shapes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from train.checkpoint.tree_paths import named_leaves
from train.optim.optimizer import Optimizer, is_axes
from train.step import apply_if_accepted
from transformer.layers.logical_axes import LogicalAxes

NamedLeaves = dict[str, Any]
"""Arrays of a tree by path."""


def offload_state(
    optimizer: Optimizer,
    axes: Any,  # tree of `LogicalAxes` with the structure of the parameters
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with its state in host memory, and `accept_update` as argument.

    Every optimizer treats the layers of a stacked parameter independently, so results are those of
    the plain optimizer. Parameters outside the stacks (embeddings, the final norm) are updated at
    once.
    """

    def update(
        grads: Any, state: Any, params: Any = None, *, accept_update: jax.Array, **_: Any
    ) -> tuple[Any, Any]:
        old_leaves = named_leaves(state)
        directions, new_leaves = named_leaves(grads), dict(old_leaves)
        for num_layers, selected in group_by_num_layers(axes, grads).items():
            trees = (mask_leaves(tree, selected) for tree in (axes, grads, params))
            update_group = update_whole if num_layers is None else update_by_layer
            group_directions, group_leaves = update_group(
                optimizer, old_leaves, accept_update, *trees
            )
            directions |= named_leaves(group_directions)
            new_leaves |= group_leaves
        return unflatten_named(grads, directions), unflatten_named(state, new_leaves)

    return optax.GradientTransformationExtraArgs(optimizer.make(axes).init, update)


def update_whole(
    optimizer: Optimizer,
    state: NamedLeaves,
    accept_update: jax.Array,
    axes: Any,
    grads: Any,
    params: Any,
) -> tuple[Any, NamedLeaves]:
    """Return the directions of a group of parameters and its new state, updated at once."""
    # Of this group alone: the other parameters are masked, so optax keeps no state of them.
    transformation = apply_if_accepted(optimizer.make(axes))
    shapes = jax.eval_shape(transformation.init, params)
    old_state = to_device_memory(unflatten_named(shapes, state))
    directions, new_state = transformation.update(
        grads, old_state, params, accept_update=accept_update
    )
    return directions, to_host_memory(named_leaves(new_state))


def update_by_layer(
    optimizer: Optimizer,
    state: NamedLeaves,
    accept_update: jax.Array,
    axes: Any,
    grads: Any,
    params: Any,
) -> tuple[Any, NamedLeaves]:
    """Return the directions of stacked parameters and their new state, updated layer by layer.

    All parameters of the group have the same number of layers.
    """
    layer_axes = jax.tree.map(single_layer_axes, axes, is_leaf=is_axes)
    transformation = apply_if_accepted(optimizer.make(layer_axes))
    shapes = jax.eval_shape(lambda: transformation.init(select_layer(0, params)))
    # Leaves with the same shape for one layer as for the stack, such as the number of updates,
    # belong to no layer. The loop carries them unchanged until its last iteration.
    shared = {
        name: to_device_memory(state[name])
        for name, leaf in named_leaves(shapes).items()
        if leaf.shape == state[name].shape
    }
    stacked = {name: state[name] for name in named_leaves(shapes) if name not in shared}

    # The loop overwrites gradients with directions and old moments with new ones, in place: its
    # carry is the only copy of either.
    def update_layer(
        index: jax.Array, carry: tuple[Any, NamedLeaves, NamedLeaves]
    ) -> tuple[Any, NamedLeaves, NamedLeaves]:
        grads_or_directions, moments, _ = carry
        # One layer crosses to the device here, and back below.
        fetched = to_device_memory(select_layer(index, moments))
        directions, new_state = transformation.update(
            select_layer(index, grads_or_directions),
            unflatten_named(shapes, shared | fetched),
            select_layer(index, params),
            accept_update=accept_update,
        )
        leaves = named_leaves(new_state)
        stored = to_host_memory({name: leaves[name] for name in stacked})
        return (
            set_layer(index, grads_or_directions, directions),
            set_layer(index, moments, stored),
            {name: leaves[name] for name in shared},
        )

    # The shared leaves enter every layer's update as they were before the step: a count of updates
    # must not rise once for each layer.
    num_layers = len(jax.tree.leaves(grads)[0])
    directions, moments, new_shared = jax.lax.fori_loop(
        0, num_layers, update_layer, (grads, stacked, shared)
    )
    return directions, moments | to_host_memory(new_shared)


def group_by_num_layers(axes: Any, grads: Any) -> dict[int | None, list[bool]]:
    """Return the parameters of each number of layers, as a mask over the leaves.

    The key None has the parameters that are in no stack of layers.
    """
    pairs = zip(jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(grads), strict=True)
    counts = [len(leaf) if each.stack[:1] == ("layers",) else None for each, leaf in pairs]
    return {key: [count == key for count in counts] for key in counts}


def single_layer_axes(axes: LogicalAxes) -> LogicalAxes:
    """Return the axes of one layer of a stacked parameter."""
    return LogicalAxes(axes.stack[1:], axes.inputs, axes.outputs)


def unflatten_named(tree: Any, leaves: NamedLeaves) -> Any:
    """Return a tree with the structure of `tree` and the leaves of these names."""
    return jax.tree.unflatten(
        jax.tree.structure(tree), [leaves[name] for name in named_leaves(tree)]
    )


def mask_leaves(tree: Any, selected: Sequence[bool]) -> Any:
    """Return the tree with all other leaves replaced by `optax.MaskedNode`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_axes)
    pairs = zip(leaves, selected, strict=True)
    masked = [leaf if keep else optax.MaskedNode() for leaf, keep in pairs]
    return jax.tree.unflatten(structure, masked)


def select_layer(layer_index: Any, stacked: Any) -> Any:
    """Return one layer of each array."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer_index, keepdims=False), stacked
    )


def set_layer(layer_index: jax.Array, stacked: Any, layer: Any) -> Any:
    """Return the arrays with one layer replaced."""
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, layer_index, axis=0),
        stacked,
        layer,
    )


def to_device_memory(tree: Any) -> Any:
    """Return the arrays in device memory."""
    return jax.device_put(tree, jax.memory.Space.Device)


def to_host_memory(tree: Any) -> Any:
    """Return the arrays in host memory."""
    return jax.device_put(tree, jax.memory.Space.Host)
