"""An update whose state waits in the memory of the host, and comes layer by layer.

The moments of AdamW weigh twice as much as the weights. If all of them came at once for the update,
the device would need room for them, and nothing were gained.
"""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from train.leaves import named
from train.optimizers.base import Optimizer, is_axes
from train.optimizers.guarded import guarded
from transformer.weights import Axes

Leaves = dict[str, Any]
"""The arrays of a tree by name."""


def streamed(
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
        before = named(state)
        directions, after = named(grads), dict(before)
        for layers, chosen in parts(axes, grads).items():
            own = (only(tree, chosen) for tree in (axes, grads, params))
            move = in_one_piece if layers is None else layer_by_layer
            found, moved = move(optimizer, before, fine, *own)
            directions |= named(found)
            after |= moved
        return rebuilt(grads, directions), rebuilt(state, after)

    return optax.GradientTransformationExtraArgs(optimizer.make(axes).init, update)


def in_one_piece(
    optimizer: Optimizer, state: Leaves, fine: jax.Array, axes: Any, grads: Any, params: Any
) -> tuple[Any, Leaves]:
    """Directions for some of the parameters, and their part of the state one update on."""
    rule = guarded(optimizer.make(axes))
    old = fetched(rebuilt(jax.eval_shape(rule.init, params), state))
    directions, new = rule.update(grads, old, params, fine=fine)
    return directions, stored(named(new))


def layer_by_layer(
    optimizer: Optimizer, state: Leaves, fine: jax.Array, axes: Any, grads: Any, params: Any
) -> tuple[Any, Leaves]:
    """The same for parameters of as many layers, of which one at a time has its state here.

    The loop writes each result to where it read what it is made of: nothing is there twice.
    """
    rule = guarded(optimizer.make(jax.tree.map(of_a_layer, axes, is_leaf=is_axes)))
    shapes = jax.eval_shape(lambda: rule.init(at(0, params)))
    shared = {  # a number of updates belongs to no layer
        name: fetched(state[name])
        for name, leaf in named(shapes).items()
        if leaf.shape == state[name].shape
    }
    stacked = {name: state[name] for name in named(shapes) if name not in shared}

    def layer(number: jax.Array, carry: tuple[Any, Leaves, Leaves]) -> tuple[Any, Leaves, Leaves]:
        rows, moments, _ = carry
        old = rebuilt(shapes, shared | fetched(at(number, moments)))
        directions, new = rule.update(at(number, rows), old, at(number, params), fine=fine)
        found = named(new)
        moments = put(number, moments, stored({name: found[name] for name in stacked}))
        return put(number, rows, directions), moments, {name: found[name] for name in shared}

    layers = len(jax.tree.leaves(grads)[0])
    directions, moments, new = jax.lax.fori_loop(0, layers, layer, (grads, stacked, shared))
    return directions, moments | stored(new)


def parts(axes: Any, grads: Any) -> dict[int | None, list[bool]]:
    """Which parameters have as many layers, by their number; None: are in no stack of layers."""
    pairs = zip(jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(grads), strict=True)
    counts = [len(leaf) if each.stack[:1] == ("layers",) else None for each, leaf in pairs]
    return {own: [count == own for count in counts] for own in counts}


def of_a_layer(axes: Axes) -> Axes:
    """The axes of what is left of a weight when one of its layers is taken."""
    return Axes(axes.stack[1:], axes.inputs, axes.outputs)


def rebuilt(tree: Any, found: Leaves) -> Any:
    """A tree like this one of the leaves by name."""
    return jax.tree.unflatten(jax.tree.structure(tree), [found[name] for name in named(tree)])


def only(tree: Any, chosen: Sequence[bool]) -> Any:
    """The tree with those of its leaves alone; the others are masked."""
    found, structure = jax.tree.flatten(tree, is_leaf=is_axes)
    pairs = zip(found, chosen, strict=True)
    masked = [leaf if own else optax.MaskedNode() for leaf, own in pairs]
    return jax.tree.unflatten(structure, masked)


def at(number: Any, stacked: Any) -> Any:
    """One layer of each array."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), stacked
    )


def put(number: jax.Array, stacked: Any, layer: Any) -> Any:
    """The arrays with one layer replaced."""
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, number, axis=0),
        stacked,
        layer,
    )


def fetched(tree: Any) -> Any:
    """The arrays in the memory of the device."""
    return jax.device_put(tree, jax.memory.Space.Device)


def stored(tree: Any) -> Any:
    """The arrays in the memory of the host."""
    return jax.device_put(tree, jax.memory.Space.Host)
