"""Weights of a stack as decoding reads them.

Decoding reads every weight once for every token. Sliced from a stack, each layer's weights are
copied at each step; unstacked beforehand (`UnstackedLayers`), they are not.
"""

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

    def pick(leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(leaf, index + nan, keepdims=False)

    return jax.tree.map(pick, weights)


Params = dict[str, Any]
"""Parameters of a model: nested dicts of arrays."""


def unstack_for_decoding(params: Params) -> Params:
    """Return a model's parameters with a copy of each layer's weights, for `generate`.

    The copy takes as much memory as the layers: use it in a server, which can drop the stacked
    weights. `generate` applies `unstack_where_memory_allows` itself.
    """
    check_has_layers(params)
    return {**params, "layers": jax.jit(unstack_layers)(params["layers"])}


def unstack_where_memory_allows(params: Params) -> Params:
    """Return a model's parameters as `prefill` and `decode_step` take them.

    On a single CPU device each layer's weights become views of the stacks, which take no memory
    (elsewhere no array lies within another). On a single accelerator they become copies, if a
    quarter of its free memory holds them, so that most is left for the cache: a step copies each
    layer of stacks before it uses it, and moves more than twice the bytes. Otherwise the stacks are
    unchanged. Drop the result soon: as long as it lives, `params` cannot be donated.
    """
    check_has_layers(params)
    # NumPy arrays, as an import may give, have no `devices`, which decide below.
    params = jax.tree.map(jnp.asarray, params)
    stacks = params["layers"]
    leaves = jax.tree.leaves(stacks)
    if not leaves or any(isinstance(weights, UnstackedLayers) for weights in stacks.values()):
        return params
    devices = set().union(*(leaf.devices() for leaf in leaves))
    if len(devices) > 1:
        return params
    [device] = devices
    if device.platform != "cpu":
        num_bytes = sum(leaf.nbytes for leaf in leaves)
        return unstack_for_decoding(params) if num_bytes <= free_bytes(device) / 4 else params
    # NumPy cannot import it by DLPack: its own dtypes have no bfloat16.
    if any(leaf.dtype == jnp.bfloat16 for leaf in leaves):
        return params
    # `np.from_dlpack`, not `np.asarray`: JAX caches the result of the latter in the array, which
    # then keeps a reference that prevents donation for good.
    views = unstack_layers(jax.tree.map(np.from_dlpack, stacks))
    # May alias, not must: memory of a layer that does not start at a multiple of 64 bytes is
    # copied, with the same result.
    views = jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=True), views)
    return {**params, "layers": views}


def free_bytes(device: jax.Device) -> int:
    """Return the free memory of a device; 0 if its runtime does not say."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def check_has_layers(params: Params) -> None:
    """Raise ValueError unless these are a model's parameters, with a stack of layers."""
    if "layers" not in params:
        raise ValueError('params: have no layers; give variables["params"] of a model')


def unstack_layers(stack_params: dict[str, Any]) -> dict[str, UnstackedLayers]:
    """Return the parameters of a stack with separate arrays for each layer, for `apply` only."""

    def unstack(stacked: Any) -> UnstackedLayers:
        # All weights of a place are stacked over the same layers, so any leaf tells their number.
        num_layers = len(jax.tree.leaves(stacked)[0])
        return UnstackedLayers(
            tuple(
                jax.tree.map(lambda leaf, index=index: leaf[index], stacked)
                for index in range(num_layers)
            )
        )

    return {name: unstack(weights) for name, weights in stack_params.items()}
