"""Optimizer state in host memory, fetched for the update one layer at a time.

The moments of AdamW take twice the memory of the float32 weights. Fetching all of them at once for
the update would need that memory on the device after all, so a loop over the layers fetches,
updates and stores the state of one layer at a time.

Parameters are updated in groups with the same number of layers. In the trees of a group, all other
parameters are replaced by `optax.MaskedNode`, of which optax keeps no state.
"""

import dataclasses
from typing import Any

import jax
import optax

from train.optim.optimizer import Optimizer, make_rejectable
from transformer.layers.logical_axes import LogicalAxes


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
        counts = jax.tree.map(_count_layers, axes, grads)
        directions, new_state = grads, state
        for num_layers in set(jax.tree.leaves(counts)):
            group_axes, group_grads, group_params = (
                _select_group(num_layers, counts, tree) for tree in (axes, grads, params)
            )
            update_group = _update_by_layer if num_layers else _update_at_once
            group_directions, group_state = update_group(
                optimizer, group_axes, group_grads, group_params, state, accept_update
            )
            directions = _replace_unmasked(directions, group_directions)
            new_state = _replace_unmasked(new_state, group_state)
        return directions, new_state

    return optax.GradientTransformationExtraArgs(optimizer.make(axes).init, update)


def _update_at_once(
    optimizer: Optimizer,
    axes: Any,
    grads: Any,
    params: Any,
    full_state: Any,  # of the parameters of all groups
    accept_update: jax.Array,
) -> tuple[Any, Any]:
    """Return the directions of a group of parameters, and its new state."""
    transformation = make_rejectable(optimizer, axes)
    state = _mask_like(jax.eval_shape(transformation.init, params), full_state)
    directions, new_state = transformation.update(
        grads, _to_device(state), params, accept_update=accept_update
    )
    return directions, _to_host(new_state)


def _update_by_layer(
    optimizer: Optimizer,
    axes: Any,
    grads: Any,
    params: Any,
    full_state: Any,  # of the parameters of all groups
    accept_update: jax.Array,
) -> tuple[Any, Any]:
    """Return the directions of stacked parameters with equally many layers, and their new state."""
    layer_axes = jax.tree.map(lambda leaf: dataclasses.replace(leaf, stack=leaf.stack[1:]), axes)
    transformation = make_rejectable(optimizer, layer_axes)
    layer_shapes = jax.eval_shape(lambda: transformation.init(_select_layer(0, params)))
    state = _mask_like(layer_shapes, full_state)
    # Leaves with the same shape for one layer as for the stack, such as the number of updates,
    # belong to no layer. They enter every layer's update as they were before the step: a count
    # must not rise once for each layer.
    is_shared = jax.tree.map(lambda layer, leaf: layer.shape == leaf.shape, layer_shapes, state)
    state = jax.tree.map(lambda shared, x: _to_device(x) if shared else x, is_shared, state)

    # The loop overwrites gradients with directions and old moments with new ones, in place: its
    # carry is the only copy of either.
    def update_layer(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        grads_or_directions, moments = carry
        # One layer crosses to the device here, and back below.
        layer_state = jax.tree.map(
            lambda shared, old, x: old if shared else _to_device(_select_layer(index, x)),
            is_shared,
            state,
            moments,
        )
        directions, layer_state = transformation.update(
            _select_layer(index, grads_or_directions),
            layer_state,
            _select_layer(index, params),
            accept_update=accept_update,
        )
        moments = jax.tree.map(
            lambda shared, x, new: new if shared else _set_layer(index, x, _to_host(new)),
            is_shared,
            moments,
            layer_state,
        )
        return _set_layer(index, grads_or_directions, directions), moments

    num_layers = len(jax.tree.leaves(grads)[0])
    directions, state = jax.lax.fori_loop(0, num_layers, update_layer, (grads, state))
    return directions, jax.tree.map(
        lambda shared, x: _to_host(x) if shared else x, is_shared, state
    )


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _count_layers(axes: LogicalAxes, leaf: jax.Array) -> int:
    """Return the number of layers of a parameter; 0 for one outside the stacks."""
    return len(leaf) if axes.stack[:1] == ("layers",) else 0


def _select_group(num_layers: int, counts: Any, tree: Any) -> Any:
    """Return the tree with the parameters masked that have another number of layers."""
    return jax.tree.map(
        lambda count, leaf: leaf if count == num_layers else optax.MaskedNode(), counts, tree
    )


def _mask_like(masked: Any, tree: Any) -> Any:
    """Return the tree with those leaves masked that are masked in another tree."""
    return jax.tree.map(
        lambda node, leaf: node if _is_masked(node) else leaf, masked, tree, is_leaf=_is_masked
    )


def _replace_unmasked(tree: Any, masked: Any) -> Any:
    """Return the tree with the leaves of another tree that are not masked there."""
    return jax.tree.map(
        lambda node, leaf: leaf if _is_masked(node) else node, masked, tree, is_leaf=_is_masked
    )


def _select_layer(index: Any, stacked: Any) -> Any:
    """Return one layer of each array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)


def _set_layer(index: jax.Array, stacked: Any, layer: Any) -> Any:
    """Return the arrays with one layer replaced."""
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, index, axis=0), stacked, layer
    )


def _to_device(tree: Any) -> Any:
    return jax.device_put(tree, jax.memory.Space.Device)


def _to_host(tree: Any) -> Any:
    return jax.device_put(tree, jax.memory.Space.Host)
