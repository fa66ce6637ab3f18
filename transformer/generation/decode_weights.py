"""Weights as decoding reads them: separate arrays for each layer in place of stacks.

Decoding reads every weight once for every token. Sliced from a stack, each layer's weights are
copied at each step; unstacked beforehand, they are not.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.layers.stack_weights import UnstackedLayers

Params = dict[str, Any]
"""Parameters of a model: nested dicts of arrays."""


@jax.jit
def unstack_for_decoding(params: Params) -> Params:
    """Return a model's parameters with a copy of each layer's weights, for `generate`.

    The copy takes as much memory as the layers: use it in a server, which can drop the stacked
    weights. On CPU it gains nothing over `unstack_for_decoding_without_copy`, which `generate`
    applies itself.
    """
    return {**params, "layers": unstack_layers(params["layers"])}


def unstack_for_decoding_without_copy(params: Params) -> Params:
    """Return a model's parameters as `prefill` and `decode_step` take them, without using memory.

    On CPU each layer's weights become views of the stacks; elsewhere the stacks are unchanged. Drop
    the result soon: as long as it lives, `params` cannot be donated.
    """
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
    if any(leaf.dtype == jnp.bfloat16 for leaf in leaves):
        return stack_params

    def view(stacked: Any, index: int) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf[index], may_alias=True), stacked)

    # `np.from_dlpack`, not `np.asarray`: JAX caches the result of the latter in the array, which
    # then keeps a reference that prevents donation for good.
    stacked = jax.tree.map(np.from_dlpack, stack_params)
    return {name: _unstack(weights, view) for name, weights in stacked.items()}


def _unstack(stacked: Any, select: Callable[[Any, int], Any]) -> UnstackedLayers:
    num_layers = len(jax.tree.leaves(stacked)[0])
    return UnstackedLayers(tuple(select(stacked, index) for index in range(num_layers)))
