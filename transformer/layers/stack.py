"""Layers, stacked once over a repeated pattern, then scanned or unrolled.

With P places in the pattern, layer i is place i mod P of repetition i div P. The weights of one
place are stacked over its repetitions: there is one layout of parameters, however the loop over
layers is compiled. What whole repetitions leave over is a tail, always unrolled; its layers stand
last in the stacks of their places.

Layer l draws its randomness from `fold_in(key, l)`, the same whether scanned or not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.attention.base import NO_OUTPUTS, MixerInputs, Outputs, mixer_class
from transformer.attention.config import MixerConfig
from transformer.attention.masks import Mask
from transformer.config import BlockConfig, LayerLoop, RematPolicy
from transformer.context import ModelContext
from transformer.hardware import Hardware
from transformer.layers.block import Block, BlockCache, BlockConstants, BlockOutput, Memory
from transformer.layers.dropout import fold_in
from transformer.layers.params import is_boxed_weight

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
"""What of a layer is kept for the backward pass: products with weights, or only its input; or
products with weights in the memory of the host, from where they are fetched again."""


class StackOutput(NamedTuple):
    """What a stack hands on."""

    x: jax.Array  # [B, T, D]
    cache: tuple[Any, ...] | None  # of each layer
    aux: tuple[dict[str, jax.Array], ...]  # of each place, stacked over its layers


class LayerInputs(NamedTuple):
    """What one layer works with: a slice of its place's stack."""

    weights: Any
    constants: Any
    layer_index: int | jax.Array  # l


def should_unroll(loop: LayerLoop, remat: RematPolicy, num_layers: int, hardware: Hardware) -> bool:
    """Whether layers are compiled one after the other.

    With remat, `auto` scans: unrolled, XLA's CPU compiler notices that what is computed again was
    computed before, and keeps it after all.
    """
    if loop == "auto":
        return remat == "none" and hardware.should_unroll(num_layers)
    return loop == "unroll"


class Stack(nn.Module):
    """L blocks, one after the other."""

    layer_pattern: tuple[BlockConfig, ...]
    context: ModelContext
    layer_loop: LayerLoop = "auto"
    remat: RematPolicy = "none"

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array,  # [B, T]
        mask: Mask,
        memory: Memory | None = None,
        cache: tuple[Any, ...] | None = None,
        dropout_rngs: jax.Array | None = None,  # [B]
        outputs: Outputs = NO_OUTPUTS,
    ) -> StackOutput:
        if self.remat == "offload" and self.context.hardware.platform == "cpu":
            raise ValueError(
                "model.remat offload: a CPU computes in the host's memory already; set it to dots"
            )
        places, layers = len(self.layer_pattern), self.context.num_layers
        stacks = [self.stacked_layers(place) for place in range(places)]
        caches = [None] * layers if cache is None else list(cache)
        aux: list[list[Any]] = [[] for _ in range(places)]

        def run(
            place: int, layer: LayerInputs, x: jax.Array, cache: Any, scanned: bool
        ) -> BlockOutput:
            def block(weights: Any, x: jax.Array) -> BlockOutput:
                inputs = MixerInputs(
                    positions,
                    mask,
                    cache=cache,
                    dropout_rngs=fold_in(dropout_rngs, layer.layer_index),
                    constants=layer.constants,
                    outputs=outputs,
                )
                output: Any = self.make_block(place).apply({"params": weights}, x, inputs, memory)
                return output

            if self.remat != "none":
                block = jax.checkpoint(
                    block, policy=REMAT_POLICIES[self.remat], prevent_cse=not scanned
                )
            return block(layer.weights, x)

        def repetition(x: jax.Array, group: list[LayerInputs]) -> tuple[jax.Array, list[Any]]:
            extras = []
            for place, layer in enumerate(group):
                x, _, extra = run(place, layer, x, None, scanned=True)
                extras.append(extra)
            return x, extras

        cut = any(isinstance(stack.weights, tuple) for stack in stacks)
        scanned = 0 if cut or cache is not None else self.num_scanned_layers
        if scanned:
            whole = scanned // places
            group = [jax.tree.map(lambda leaf: leaf[:whole], stack) for stack in stacks]
            x, extras = jax.lax.scan(repetition, x, group)
            aux = [[extra] for extra in extras]
        for number in range(scanned, layers):
            place, index = number % places, number // places
            layer = self.select_layer(stacks[place], index, number, None if cache is None else x)
            x, caches[number], extra = run(place, layer, x, caches[number], scanned=False)
            aux[place].append(jax.tree.map(lambda leaf: leaf[None], extra))
        return StackOutput(x, None if cache is None else tuple(caches), tuple(map(_joined, aux)))

    @property
    def num_scanned_layers(self) -> int:
        """How many layers a scan goes over: all whole repetitions of the pattern, or none."""
        layers, places = self.context.num_layers, len(self.layer_pattern)
        whole = layers // places
        unrolled = should_unroll(self.layer_loop, self.remat, layers, self.context.hardware)
        return 0 if unrolled or whole < 2 else whole * places

    @nn.nowrap
    def make_block(self, place: int) -> Block:
        return Block(self.layer_pattern[place], self.context, parent=None)

    @nn.nowrap
    def layer_indices(self, place: int) -> range:
        """The layers l at a place."""
        return range(place, self.context.num_layers, len(self.layer_pattern))

    def stacked_layers(self, place: int) -> LayerInputs:
        """All layers of a place, as one stack; or apart, where `keep_min_age` has cut the weights."""
        name = f"place_{place}"
        weights: Any
        if self.has_variable("params", name):
            weights = self.get_variable("params", name)
        else:
            weights = self.param(name, self.init_stacked_weights, place)
        constants = [self.layer_constants(place, number) for number in self.layer_indices(place)]
        return LayerInputs(
            weights,
            jax.tree.map(lambda *each: jnp.stack(each), *constants),
            jnp.array(self.layer_indices(place)),
        )

    @nn.nowrap
    def select_layer(
        self, stack: LayerInputs, index: int, number: int, after: jax.Array | None
    ) -> LayerInputs:
        """Return one layer of a stack, whose weights wait for `after_evaluation` if that is given."""
        if isinstance(stack.weights, tuple):
            weights = stack.weights[index]
        elif after is None:
            weights = _at(stack.weights, index)
        else:
            weights = _at_after(stack.weights, index, after)
        return LayerInputs(weights, _at(stack.constants, index), number)

    @nn.nowrap
    def layer_constants(self, place: int, number: int) -> Any:
        """What a layer's mixers have that is no weight, as its block takes it."""

        def of(mixer: MixerConfig) -> Any:
            return mixer_class(mixer).constants(mixer, number, self.context.d_model)

        config = self.layer_pattern[place]
        own = of(config.mixer)
        return (
            own
            if config.cross_attention is None
            else BlockConstants(own, of(config.cross_attention))
        )

    @nn.nowrap
    def init_stacked_weights(self, key: jax.Array, place: int) -> Any:
        """The weights of a place's layers, each drawn from its own key, stacked."""
        block, token = self.make_block(place), jnp.zeros((1, 1), jnp.int32)
        x = jnp.zeros((1, 1, self.context.d_model), self.context.precision.compute)
        inputs = MixerInputs(token, Mask(), constants=self.layer_constants(place, place))
        memory = Memory(x, Mask()) if self.layer_pattern[place].needs_memory else None

        def one(number: jax.Array) -> Any:
            return block.init(jax.random.fold_in(key, number), x, inputs, memory)["params"]

        boxed = jax.vmap(one)(jnp.array(self.layer_indices(place)))
        return jax.tree.map(
            lambda box: box.with_stack_axis("layers"), boxed, is_leaf=is_boxed_weight
        )


def init_cache(
    layer_pattern: tuple[BlockConfig, ...],
    context: ModelContext,
    batch_size: int,
    length: int,  # tokens
    memory_length: int = 0,  # S of the memory
) -> tuple[Any, ...]:
    """An empty cache: one entry for each layer."""

    def one(config: BlockConfig) -> Any:
        mixer = mixer_class(config.mixer)(config.mixer, context, parent=None)
        if config.mixer.reads_memory:
            return mixer.init_memory_cache(batch_size, memory_length)
        own = mixer.init_cache(batch_size, length)
        if config.cross_attention is None:
            return own
        cross = mixer_class(config.cross_attention)(config.cross_attention, context, parent=None)
        return BlockCache(own, cross.init_memory_cache(batch_size, memory_length))

    return tuple(
        one(layer_pattern[layer % len(layer_pattern)]) for layer in range(context.num_layers)
    )


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """A stack's parameters with each layer's weights as arrays of their own: copies.

    Decoding reads every weight once a token: cut beforehand, they are not copied out of the stacks
    at each step. The result is for `apply` alone.
    """
    return {name: _cut(weights, _at) for name, weights in params.items()}


def unstack_layers_without_copy(params: dict[str, Any]) -> dict[str, Any]:
    """Return what `keep_min_age` does without a copy where that can be had, else `params` as they are.

    On a single CPU, NumPy shows a part of an array as an array. The parts keep the whole alive, and
    it is not donated as long as they live. Elsewhere no array lies within another; and NumPy knows
    no bfloat16.
    """
    leaves = jax.tree.leaves(params)
    if any(isinstance(weights, tuple) for weights in params.values()) or not leaves:
        return params
    devices = set().union(*(leaf.devices() for leaf in leaves))
    if len(devices) > 1 or next(iter(devices)).platform != "cpu":
        return params
    if any(leaf.dtype == jnp.bfloat16 for leaf in leaves):
        return params

    def at(shown: Any, index: int) -> Any:
        return jax.tree.map(lambda leaf: jax.device_put(leaf[index], may_alias=True), shown)

    # Not `np.asarray`: JAX keeps what that returns, and with it the hold on the array.
    shown = jax.tree.map(np.from_dlpack, params)
    return {name: _cut(weights, at) for name, weights in shown.items()}


def _cut(weights: Any, at: Callable[[Any, int], Any]) -> tuple[Any, ...]:
    count = len(jax.tree.leaves(weights)[0])
    return tuple(at(weights, index) for index in range(count))


def _at_after(stacked: Any, index: int, after: jax.Array) -> Any:
    """Return one layer of a stack, copied out of it no earlier than `after_evaluation` is known.

    XLA otherwise takes slices at indices that it knows out of the loop over tokens, or copies those
    of all layers before the first begins: as much memory again as all weights. An index that
    depends on the layer before is the one thing that it cannot reorder: barriers are gone by the
    time it schedules. Where activations are NaN, which layer is taken makes no difference.
    """
    nan = jnp.isnan(after[(0,) * after.ndim]).astype(jnp.int32)
    pick = jax.lax.dynamic_index_in_dim
    return jax.tree.map(lambda leaf: pick(leaf, index + nan, keepdims=False), stacked)


def _at(stacked: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _joined(parts: list[Any]) -> Any:
    """Stacks of some layers, one after the other, as one."""
    return jax.tree.map(lambda *each: jnp.concatenate(each), *parts) if parts else {}
