"""A stack of layers over a repeated pattern, scanned or unrolled.

With P places in the pattern, layer l is place l % P of repetition l // P. The weights of a place
are stacked over its repetitions:

    params["layers"]["place_0"]["mixer"]["query"]  [ceil(L / P), D, N, H]

There is one parameter layout, however the loop over layers is compiled. `lax.scan` runs over whole
repetitions; the layers that remain (L % P) are the last entries of their places' stacks and are
always unrolled. Layer l uses the random key `fold_in(rng, l)`, scanned or not. A scan compiles one
repetition, so compile time does not grow with depth. Unrolled steps are faster.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from transformer.attention.masks import Mask
from transformer.attention.mixer import MixerInputs, explain_mixer_errors, mixer_class
from transformer.attention.position_bias import T5RelativeBias, declare_bias_table
from transformer.hardware import Hardware, Platform
from transformer.layers.basic import fold_in
from transformer.layers.logical_axes import box_weights, is_boxed_weight, records_axes
from transformer.model_context import ModelContext
from transformer.models.block import (
    Block,
    BlockCache,
    BlockConfig,
    BlockOutput,
    Memory,
    layer_constants,
)
from transformer.models.unstacked import UnstackedLayers, select_for_decoding
from transformer.validation import check_integer

LayerLoop = Literal["auto", "scan", "unroll"]


RematPolicy = Literal["none", "dots", "full", "offload"]


LayerPattern = tuple[BlockConfig, ...]


REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
"""Values that each layer saves for the backward pass. `dots`: outputs of matmuls with weights (no
batch dimensions; attention's scores, the largest arrays of a layer, have them). `full`: only the
layer's input. `offload`: like `dots`, saved in host memory."""


def rematerialize(
    layer: Callable[..., Any], remat: RematPolicy, hardware: Hardware, *, scanned: bool
) -> Callable[..., Any]:
    """Return the function of a layer with a policy of `REMAT_POLICIES`.

    Args:
      layer: A function of the layer's weights and input.
      remat: The policy, not `none`.
      hardware: Decides whether there is a memory to offload to.
      scanned: True inside a scan over layers.

    Raises:
      ValueError: Saved values cannot be offloaded on this hardware.
    """
    if remat == "offload" and hardware.platform == "cpu":
        raise ValueError(
            "model.remat offload: a CPU computes in the host's memory already; set it to dots"
        )
    # Inside a scan the compiler cannot merge recomputed values with saved ones, and the barriers of
    # `prevent_cse` would only cost time.
    checkpointed = jax.checkpoint(layer, policy=REMAT_POLICIES[remat], prevent_cse=not scanned)
    if hardware.platform == "cpu" and not scanned:
        return recompute_after_cotangents(checkpointed)
    return checkpointed


def recompute_after_cotangents(layer: Callable[..., BlockOutput]) -> Callable[..., BlockOutput]:
    """Return the function of a layer; its backward pass cannot begin before its cotangents exist.

    XLA's CPU compiler drops the barriers of `jax.checkpoint`. It then finds the same expressions in
    forward and backward pass, computes them once, and keeps their values in between. Here 0 times
    an entry of the cotangent is added to what the layer saved: the expressions differ, and their
    values do not, unless the gradient is not finite anyway. The addition is fused with what reads
    the saved values. It has no forward-mode derivative.
    """

    def forward(*args: Any) -> tuple[BlockOutput, Any]:
        return jax.vjp(layer, *args)

    def backward(vjp: Any, cotangents: BlockOutput) -> Any:
        zero = cotangents.x.ravel()[0] * 0

        def tie(saved: jax.Array) -> jax.Array:
            is_float = jnp.issubdtype(saved.dtype, jnp.floating)
            return saved + zero.astype(saved.dtype) if is_float else saved

        # The function that `jax.vjp` returns is a tree of the saved arrays.
        return jax.tree.map(tie, vjp)(cotangents)

    run = jax.custom_vjp(layer)
    run.defvjp(forward, backward)
    return run


MAX_UNROLLED_LAYERS: dict[Platform, int] = {"cpu": 16, "gpu": 24, "tpu": 16}
"""`auto` unrolls up to this many layers: faster steps for longer compilation."""


class StackOutput(NamedTuple):
    """Result of a stack."""

    x: Float[Array, "B T D"]
    cache: tuple[Any, ...] | None  # one entry for each layer
    aux: tuple[dict[str, jax.Array], ...]  # for each place, stacked over its layers


class LayerInputs(NamedTuple):
    """Values that differ between layers: of one layer, or of a place, stacked over its layers."""

    weights: Any
    constants: Any
    layer_index: int | jax.Array  # l; traced in a scan


def should_unroll(loop: LayerLoop, remat: RematPolicy, num_layers: int, hardware: Hardware) -> bool:
    """Return True if layers are compiled one by one instead of inside `lax.scan`.

    With remat `auto` scans: it is chosen for its memory, and a loop has the least.
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
        x: Float[Array, "B T D"],
        inputs: MixerInputs,  # `cache`: a tuple with one entry for each layer
        memory: Memory | None = None,
    ) -> StackOutput:
        num_places, num_layers = len(self.layer_pattern), self.context.num_layers
        if self.has_variable("params", f"place_{num_places}"):
            raise ValueError(
                f"parameters layers/place_{num_places}: the model's layer pattern has {num_places} "
                "places; give the parameters of this configuration"
            )
        # In the order of the pattern: Linen derives initial values from the order of declaration.
        stacks = [self.stacked_layers(place) for place in range(num_places)]
        cache, dropout_rngs = inputs.cache, inputs.dropout_rngs
        shared = self.context.share_layers
        caches = [None] * num_layers if cache is None else list(cache)
        aux: list[list[Any]] = [[] for _ in range(num_places)]

        def run_layer(
            place: int, layer: LayerInputs, x: jax.Array, cache: Any, scanned: bool
        ) -> BlockOutput:
            taps = inputs.taps
            layer_inputs = inputs.replace(
                cache=cache,
                # Keyed by the number of the layer, so dropout is the same scanned and unrolled.
                dropout_rngs=fold_in(dropout_rngs, layer.layer_index),
                constants=layer.constants,
                taps=None if taps is None else taps.replace(layer=layer.layer_index),
            )

            def apply_block(
                weights: Any, x: jax.Array, inputs: MixerInputs, memory: Memory | None
            ) -> BlockOutput:
                block = Block(self.layer_pattern[place], self.context, parent=None)
                output: Any = block.apply({"params": weights}, x, inputs, memory)
                return output

            remat = self.layer_remat(place, dropout_rngs)
            if remat != "none":
                # One for each layer: the backward pass holds recomputed values of one at a time.
                apply_block = rematerialize(
                    apply_block, remat, self.context.hardware, scanned=scanned
                )
            return apply_block(layer.weights, x, layer_inputs, memory)

        def run_repetition(
            x: jax.Array, layers: list[LayerInputs]
        ) -> tuple[jax.Array, list[dict[str, Any]]]:
            aux_of_places = []
            for place, layer in enumerate(layers):
                if shared:
                    layer = layer._replace(weights=_at(stacks[place].weights, 0))
                x, _, layer_aux = run_layer(place, layer, x, None, scanned=True)
                aux_of_places.append(layer_aux)
            return x, aux_of_places

        # Decoding unrolls: each layer appends to its own cache; caches are never stacked.
        unstacked = any(isinstance(stack.weights, UnstackedLayers) for stack in stacks)
        num_scanned = 0 if unstacked or cache is not None else self.num_scanned_layers
        if num_scanned:
            # The first places of the pattern may have one layer more: the remainder, run below.
            repetitions = num_scanned // num_places
            # Shared weights are the same in each repetition: not among what the scan slices.
            differing = [stack._replace(weights=None) if shared else stack for stack in stacks]
            scanned = [jax.tree.map(lambda leaf: leaf[:repetitions], each) for each in differing]
            # The scan slices the leading axis of all leaves: weights, constants and layer numbers.
            x, scanned_aux = jax.lax.scan(run_repetition, x, scanned)
            aux = [[place_aux] for place_aux in scanned_aux]
        for layer_index in range(num_scanned, num_layers):
            place = layer_index % num_places
            index = layer_index // num_places
            weights, constants, _ = stacks[place]
            weights_index = 0 if shared else index
            if unstacked or cache is not None:  # x orders the copies: one layer in memory at a time
                weights = select_for_decoding(weights, weights_index, x)
            else:
                weights = _at(weights, weights_index)
            layer = LayerInputs(weights, _at(constants, index), layer_index)
            output = run_layer(place, layer, x, caches[layer_index], scanned=False)
            x, caches[layer_index] = output.x, output.cache
            # With a leading axis, like the stacked result of a scan, to which it is appended.
            aux[place].append(jax.tree.map(lambda leaf: leaf[None], output.aux))
        new_cache = None if cache is None else tuple(caches)
        return StackOutput(
            x, new_cache, tuple(_combine_trees(jnp.concatenate, trees) for trees in aux)
        )

    def layer_remat(self, place: int, dropout_rngs: jax.Array | None) -> RematPolicy:
        """Return what the layers of a place recompute in the backward pass.

        In training on a CPU, `none` becomes `dots` for attention: writing its scores, the norms and
        the activations to memory and reading them again takes as long as computing them again, and
        they are two thirds of what a layer saves. Mixers without attention weights may be loops
        over the tokens, which are slow to run again.
        """
        if self.remat != "none" or dropout_rngs is None or self.context.hardware.platform != "cpu":
            return self.remat
        mixer = self.layer_pattern[place].mixer
        return "dots" if mixer_class(mixer).abilities(mixer).weights else "none"

    @property
    def num_scanned_layers(self) -> int:
        """Number of layers that a scan runs over: all whole repetitions of the pattern, or 0."""
        num_layers, num_places = self.context.num_layers, len(self.layer_pattern)
        repetitions = num_layers // num_places
        unrolled = should_unroll(self.layer_loop, self.remat, num_layers, self.context.hardware)
        # A scan of one repetition would be a loop of length 1.
        return 0 if unrolled or repetitions < 2 else repetitions * num_places

    def stacked_layers(self, place: int) -> LayerInputs:
        """Declare the weights of one place and return them with the other inputs of its layers."""
        name, pattern, context = f"place_{place}", self.layer_pattern, self.context
        indices = range(place, context.num_layers, len(pattern))
        weights: Any
        if self.has_variable("params", name):
            # Not `self.param`, which compares shapes with those of `init`: a place may hold
            # `UnstackedLayers`.
            weights = self.get_variable("params", name)
            # Slices of the stacked arrays would leave layers out, or repeat the last one.
            is_unstacked = isinstance(weights, UnstackedLayers)
            stacks = [weights.layers] if is_unstacked else jax.tree.leaves(weights)
            num_stacked = 1 if context.share_layers else len(indices)
            for stack in stacks:
                if len(stack) != num_stacked:
                    raise ValueError(
                        f"parameters layers/{name}: have {len(stack)} layers, but the model has "
                        f"{num_stacked}; give the parameters of this configuration"
                    )
        else:
            # One parameter whose value is a tree: the weights of all layers of this place.
            weights = self.param(name, init_place, pattern, context, place)
        # Random blocks, features and rotations: not trained, but different in each layer.
        constants = [layer_constants(pattern[place], index, context) for index in indices]
        return LayerInputs(weights, _combine_trees(jnp.stack, constants), jnp.array(indices))


def _at(tree: Any, index: int) -> Any:
    """Return the values of one layer from arrays that are stacked over layers."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _combine_trees(
    combine: Callable[[tuple[jax.Array, ...]], jax.Array],
    trees: list[Any],  # of arrays, one for each layer of a place
) -> Any:
    """Return one tree whose arrays are `combine` of those of all trees; {} of no trees."""
    return jax.tree.map(lambda *leaves: combine(leaves), *trees) if trees else {}


def init_place(rng: jax.Array, pattern: LayerPattern, context: ModelContext, place: int) -> Any:
    """Return initial weights of the layers at one place, stacked along a new first axis.

    Layer l is initialized with the key `fold_in(rng, l)`, so its weights do not depend on the
    pattern's length or on the number of layers.
    """
    config = pattern[place]
    # Unbound, for the values of its weights alone: the stack declares them, of all layers at once.
    block = Block(config, context, parent=None)
    # One token: no weight has a shape that depends on B or T.
    x = jnp.zeros((1, 1, context.d_model), context.precision.compute)
    positions = jnp.zeros((1, 1), jnp.int32)
    constants, shared_bias = layer_constants(config, place, context), zero_shared_bias(pattern)
    inputs = MixerInputs(positions, Mask(), constants=constants, shared_bias=shared_bias)
    memory = Memory(x, Mask()) if config.needs_memory else None

    def init_layer(layer_index: jax.Array) -> Any:
        weights = block.init(jax.random.fold_in(rng, layer_index), x, inputs, memory)["params"]
        # Boxed within the layer, where the axes of a weight without names can still be told apart.
        return box_weights(weights) if records_axes() else weights

    # `vmap` and not a loop: one traced layer, whatever the depth. Its new first axis is the
    # stack's, which the names of the boxes do not have yet.
    num_layers = place + 1 if context.share_layers else context.num_layers
    indices = jnp.arange(place, num_layers, len(pattern))
    weights = jax.vmap(init_layer)(indices)
    if not records_axes():
        return weights
    return jax.tree.map(lambda box: box.with_stack_axis("layers"), weights, is_leaf=is_boxed_weight)


def supports_segments(pattern: LayerPattern) -> bool:
    """Return True if all mixers of a model separate packed documents and ignore padding."""
    mixers = {block.mixer for block in pattern}
    return all(mixer_class(mixer).abilities(mixer).segments for mixer in mixers)


def init_cache(
    pattern: LayerPattern,
    context: ModelContext,
    batch_size: int,
    length: int,  # tokens
    memory_length: int = 0,  # S of the memory
) -> tuple[Any, ...]:
    """Return an empty cache: one entry for each layer."""
    check_integer("batch_size", batch_size, 1)
    check_integer("length", length, 1)

    def init_layer(config: BlockConfig) -> Any:
        mixer = mixer_class(config.mixer)(config.mixer, context, parent=None)
        # A decoder with attention inside is both mixer and cross-attention: one cache holds its
        # state and what it needs of the memory.
        with explain_mixer_errors(config.mixer):
            if config.mixer.reads_memory:
                return mixer.init_memory_cache(batch_size, memory_length)
            mixer_cache = mixer.init_cache(batch_size, length)
        if config.cross_attention is None:
            return mixer_cache
        cross = mixer_class(config.cross_attention)(config.cross_attention, context, parent=None)
        return BlockCache(mixer_cache, cross.init_memory_cache(batch_size, memory_length))

    # By layer, not stacked like the weights: decoding replaces the cache of one layer at a time,
    # and writing into a stack would need an index into it.
    return tuple(init_layer(pattern[i % len(pattern)]) for i in range(context.num_layers))


def find_shared_bias(pattern: LayerPattern) -> tuple[T5RelativeBias, int] | None:
    """Return the settings and the heads of the table that the layers of a stack share, if any.

    Raises:
      ValueError: Layers share a table and have different settings of it.
    """
    mixers: list[Any] = [block.mixer for block in pattern]
    biases = {
        (mixer.position, mixer.num_heads)
        for mixer in mixers
        if isinstance(getattr(mixer, "position", None), T5RelativeBias) and mixer.position.shared
    }
    if len(biases) > 1:
        raise ValueError(
            "T5RelativeBias.shared True: the layers have different buckets or heads; give all "
            "the same, or set it to False"
        )
    return biases.pop() if biases else None


def declare_shared_bias(
    module: nn.Module, pattern: LayerPattern, context: ModelContext
) -> Float[Array, "buckets N"] | None:
    """Declare the table that all layers of a stack share as a weight of `module`, if any."""
    shared = find_shared_bias(pattern)
    return None if shared is None else declare_bias_table(module, *shared, context)


def zero_shared_bias(pattern: LayerPattern) -> Float[Array, "buckets N"] | None:
    """Return zeros in the shape of the shared table, to initialize a layer alone."""
    shared = find_shared_bias(pattern)
    return None if shared is None else jnp.zeros((shared[0].num_buckets, shared[1]))
