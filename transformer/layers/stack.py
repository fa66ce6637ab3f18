"""A stack of layers over a repeated pattern, scanned or unrolled.

With P places in the pattern, layer l is place l % P of repetition l // P. The weights of a place
are stacked over its repetitions:

    params["layers"]["place_0"]["mixer"]["query"]  [ceil(L / P), D, N, H]

There is one parameter layout, however the loop over layers is compiled. `lax.scan` runs over whole
repetitions; the layers that remain (L % P) are the last entries of their places' stacks and are
always unrolled. Layer l uses the random key `fold_in(rng, l)`, scanned or not. A scan compiles one
repetition, so compile time does not grow with depth. Unrolled steps are faster.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.mixer import MixerInputs
from transformer.config import BlockConfig, LayerLoop, RematPolicy
from transformer.hardware import Hardware, Platform
from transformer.inspection import observe_block
from transformer.layers.basic import fold_in
from transformer.layers.block import Block, BlockOutput, layer_constants
from transformer.layers.cross_attention import Memory
from transformer.layers.remat import rematerialize
from transformer.layers.stack_weights import (
    UnstackedLayers,
    init_place,
    select_for_decoding,
    wrong_depth,
)
from transformer.model_context import ModelContext

MAX_UNROLLED_LAYERS: dict[Platform, int] = {"cpu": 16, "gpu": 24, "tpu": 16}
"""`auto` unrolls up to this many layers: faster steps for longer compilation."""


class StackOutput(NamedTuple):
    """Result of a stack."""

    x: jax.Array  # [B, T, D]
    cache: tuple[Any, ...] | None  # one entry for each layer
    aux: tuple[dict[str, jax.Array], ...]  # for each place, stacked over its layers


class LayerInputs(NamedTuple):
    """Values that differ between layers: of one layer, or of a place, stacked over its layers."""

    weights: Any
    constants: Any
    layer_index: int | jax.Array  # l; traced in a scan


def should_unroll(loop: LayerLoop, remat: RematPolicy, num_layers: int, hardware: Hardware) -> bool:
    """Return True if layers are compiled one by one instead of inside `lax.scan`.

    With remat `auto` scans: unrolled, XLA's CPU compiler merges recomputed and original values.
    """
    if loop == "auto":
        return remat == "none" and num_layers <= MAX_UNROLLED_LAYERS[hardware.platform]
    return loop == "unroll"


class Stack(nn.Module):
    """L layers, one after the other."""

    layer_pattern: tuple[BlockConfig, ...]
    context: ModelContext
    layer_loop: LayerLoop = "auto"
    remat: RematPolicy = "none"

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        inputs: MixerInputs,  # `cache`: a tuple with one entry for each layer
        memory: Memory | None = None,
    ) -> StackOutput:
        num_places, num_layers = len(self.layer_pattern), self.context.num_layers
        # In the order of the pattern: Linen derives initial values from the order of declaration.
        stacks = [self.stacked_layers(place) for place in range(num_places)]
        cache, dropout_rngs = inputs.cache, inputs.dropout_rngs
        caches = [None] * num_layers if cache is None else list(cache)
        aux: list[list[Any]] = [[] for _ in range(num_places)]

        def run_layer(
            place: int, layer: LayerInputs, x: jax.Array, cache: Any, scanned: bool
        ) -> BlockOutput:
            def block(weights: Any, x: jax.Array) -> BlockOutput:
                # Keyed by the number of the layer, so dropout is the same scanned and unrolled.
                rngs = fold_in(dropout_rngs, layer.layer_index)
                own = inputs.replace(cache=cache, dropout_rngs=rngs, constants=layer.constants)
                module = self.make_block(place)
                if inputs.taps is not None:
                    return observe_block(module, weights, x, own, memory, layer.layer_index)
                output: Any = module.apply({"params": weights}, x, own, memory)
                return output

            if self.remat != "none":
                # One for each layer: the backward pass holds recomputed values of one at a time.
                block = rematerialize(block, self.remat, self.context.hardware, scanned=scanned)
            return block(layer.weights, x)

        def run_repetition(
            x: jax.Array, layers: list[LayerInputs]
        ) -> tuple[jax.Array, list[dict[str, Any]]]:
            aux_of_places = []
            for place, layer in enumerate(layers):
                x, _, layer_aux = run_layer(place, layer, x, None, scanned=True)
                aux_of_places.append(layer_aux)
            return x, aux_of_places

        # Decoding unrolls: each layer appends to its own cache; caches are never stacked.
        unstacked = any(isinstance(stack.weights, UnstackedLayers) for stack in stacks)
        num_scanned = 0 if unstacked or cache is not None else self.num_scanned_layers
        if num_scanned:
            # The first places of the pattern may have one layer more: the remainder, run below.
            repetitions = num_scanned // num_places
            scanned = [jax.tree.map(lambda leaf: leaf[:repetitions], stack) for stack in stacks]
            # The scan slices the leading axis of all leaves: weights, constants and layer numbers.
            x, scanned_aux = jax.lax.scan(run_repetition, x, scanned)
            aux = [[place_aux] for place_aux in scanned_aux]
        for layer_index in range(num_scanned, num_layers):
            place, index = layer_index % num_places, layer_index // num_places
            weights, constants, _ = stacks[place]
            if unstacked or cache is not None:  # x orders the copies: one layer in memory at a time
                weights = select_for_decoding(weights, index, x)
            else:
                weights = jax.tree.map(lambda leaf, index=index: leaf[index], weights)
            constants = jax.tree.map(lambda leaf, index=index: leaf[index], constants)
            layer = LayerInputs(weights, constants, layer_index)
            output = run_layer(place, layer, x, caches[layer_index], scanned=False)
            x, caches[layer_index], layer_aux = output
            # With a leading axis, like the stacked result of a scan, to which it is appended.
            aux[place].append(jax.tree.map(lambda leaf: leaf[None], layer_aux))
        new_cache = None if cache is None else tuple(caches)
        # Trees of arrays by layer, as one array each; a place without a layer has none.
        concatenate = lambda *stacks: jnp.concatenate(stacks)  # noqa: E731
        aux_of_places = (jax.tree.map(concatenate, *each) if each else {} for each in aux)
        return StackOutput(x, new_cache, tuple(aux_of_places))

    @property
    def num_scanned_layers(self) -> int:
        """Number of layers that a scan runs over: all whole repetitions of the pattern, or 0."""
        num_layers, num_places = self.context.num_layers, len(self.layer_pattern)
        repetitions = num_layers // num_places
        unrolled = should_unroll(self.layer_loop, self.remat, num_layers, self.context.hardware)
        # A scan of one repetition would be a loop of length 1.
        return 0 if unrolled or repetitions < 2 else repetitions * num_places

    @nn.nowrap
    def make_block(self, place: int) -> Block:
        """Return the module of the layers at one place; unbound: its weights are passed in."""
        return Block(self.layer_pattern[place], self.context, parent=None)

    def stacked_layers(self, place: int) -> LayerInputs:
        """Declare the weights of one place and return them with the other inputs of its layers."""
        name, pattern, context = f"place_{place}", self.layer_pattern, self.context
        indices = range(place, context.num_layers, len(pattern))
        weights: Any
        if self.has_variable("params", name):
            # Not `self.param`, which compares shapes with those of `init`: a place may hold
            # `UnstackedLayers`.
            weights = self.get_variable("params", name)
            is_unstacked = isinstance(weights, UnstackedLayers)
            heights = [weights.layers] if is_unstacked else jax.tree.leaves(weights)
            extra_place = self.has_variable("params", f"place_{len(pattern)}")
            if extra_place or any(len(each) != len(indices) for each in heights):
                raise wrong_depth(name, len(heights[0]), len(indices), len(pattern))
        else:
            # One parameter whose value is a tree: the weights of all layers of this place.
            weights = self.param(name, init_place, pattern, context, place)
        # Random blocks, features and rotations: not trained, but different in each layer.
        constants = [layer_constants(pattern[place], index, context) for index in indices]
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *constants)
        return LayerInputs(weights, stacked, jnp.array(indices))
