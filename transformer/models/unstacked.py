"""Weights of a stack as decoding reads them.

Decoding reads every weight once for every token. Sliced from a stack, each layer's weights are
copied at each step; unstacked beforehand (`UnstackedLayers`), they are not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


class UnstackedLayers(struct.PyTreeNode):
    """Weights of one place of the pattern with separate arrays for each layer, for decoding.

    `unstack_for_decoding` makes them; a parameter tree may hold them in place of the stacked
    arrays of a place. They are read by `apply` only: training and checkpoints use stacked arrays.
    """

    layers: tuple[Any, ...]


def select_for_decoding(
    weights: Any,  # UnstackedLayers, or arrays stacked over the layers of a place
    index: int,
    after: jax.Array,  # the layer's input
) -> Any:
    """Return one layer's weights; stacked ones are copied no earlier than `after` is computed.

    In a decoding loop, XLA otherwise hoists slices at constant indices out of the loop over tokens,
    or copies those of all layers before the first layer runs: as much memory again as all weights.
    An index that depends on the previous layer's output is the one thing it cannot reorder:
    optimization barriers are gone by the time it schedules. The index is always `index`, unless
    activations are NaN, when it makes no difference which layer is read.
    """
    if isinstance(weights, UnstackedLayers):
        return weights.layers[index]
    # 0, but XLA cannot know it before `after` is computed. One entry is enough: it depends on the
    # whole layer before. An index past the end (NaN, last layer) is clamped by `dynamic_slice`.
    nan = jnp.isnan(after[(0,) * after.ndim]).astype(jnp.int32)
    pick = jax.lax.dynamic_index_in_dim
    return jax.tree.map(lambda leaf: pick(leaf, index + nan, keepdims=False), weights)


Params = dict[str, Any]
"""Parameters of a model: nested dicts of arrays."""


def unstack_for_decoding(params: Params) -> Params:
    """Return a model's parameters with a copy of each layer's weights, for `generate`.

    The copy takes as much memory as the layers: use it in a server, which can drop the stacked
    weights. On CPU it gains nothing over `unstack_for_decoding_without_copy`, which `generate`
    applies itself.
    """
    if "layers" not in params:
        raise ValueError("params: have no layers; give the parameters of a LanguageModel")
    return _unstack_copy(params)


@jax.jit
def _unstack_copy(params: Params) -> Params:
    return {**params, "layers": unstack_layers(params["layers"])}


def unstack_for_decoding_without_copy(params: Params) -> Params:
    """Return a model's parameters as `prefill` and `decode_step` take them, without using memory.

    On CPU each layer's weights become views of the stacks; elsewhere the stacks are unchanged. Drop
    the result soon: as long as it lives, `params` cannot be donated.
    """
    if "layers" not in params:
        raise ValueError('params: have no layers; give variables["params"] of a model')
    # NumPy arrays, as an import may give, have no `devices`, which decide below.
    params = jax.tree.map(jnp.asarray, params)
    return {**params, "layers": unstack_layers_without_copy(params["layers"])}


def unstack_layers(stack_params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a stack with a copy of each layer's weights, for `apply` only."""

    def select(stacked: Any, index: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], stacked)

    return {name: _unstack(weights, select) for name, weights in stack_params.items()}


def unstack_layers_without_copy(stack_params: dict[str, Any]) -> dict[str, Any]:
    """Return `unstack_layers` as views where possible, else `stack_params` unchanged.

    Views need a single CPU device (elsewhere no array lies within another) and a dtype that NumPy
    knows (not bfloat16). They keep the stacked array alive and prevent its donation.
    """
    leaves = jax.tree.leaves(stack_params)
    if any(isinstance(weights, UnstackedLayers) for weights in stack_params.values()) or not leaves:
        return stack_params
    devices = set().union(*(leaf.devices() for leaf in leaves))
    if len(devices) > 1 or next(iter(devices)).platform != "cpu":
        return stack_params
    # NumPy cannot import it by DLPack: its own dtypes have no bfloat16.
    if any(leaf.dtype == jnp.bfloat16 for leaf in leaves):
        return stack_params

    # May alias, not must: memory of a layer that does not start at a multiple of 64 bytes is
    # copied, with the same result.
    def view(stacked: Any, index: int) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf[index], may_alias=True), stacked)

    # `np.from_dlpack`, not `np.asarray`: JAX caches the result of the latter in the array, which
    # then keeps a reference that prevents donation for good.
    stacked = jax.tree.map(np.from_dlpack, stack_params)
    return {name: _unstack(weights, view) for name, weights in stacked.items()}


def _unstack(stacked: Any, select: Callable[[Any, int], Any]) -> UnstackedLayers:
    # All weights of a place are stacked over the same layers, so any leaf tells their number.
    num_layers = len(jax.tree.leaves(stacked)[0])
    return UnstackedLayers(tuple(select(stacked, index) for index in range(num_layers)))
