"""Attention maps: the weights of every layer and head of a model, and the pairs that it hides.

    for layer in attention_maps(model, params, tokens=tokens):
        layer.stage, layer.layer, layer.weights, layer.visible

Unlike the output `weights` (`transformer.inspection`), a map also says which pairs of tokens the
mask and a sparse pattern hide, and sparse mixers that never hold weights have one: their result is
softmax attention under their pattern by the contract that `check_mixer` tests.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from transformer.attention.masks import Mask, dense_mask
from transformer.attention.mixer import Mixer, MixerInputs, MixerOutput
from transformer.attention.reference import ScoreSpec, attend_reference
from transformer.models.encoder_decoder import Encoder
from transformer.models.model import Model

MAX_WEIGHTS = 2**28
"""Most weights of all maps together, layers × heads × T × S; they take 4 bytes each."""

Stage = Literal["encoder", "decoder", "cross"]
"""Self-attention of an encoder or of a decoder, or attention to the encoder's output."""


class AttentionMap(NamedTuple):
    """Attention of one layer."""

    stage: Stage
    layer: int
    """Number of the layer in its stage, from 0."""
    mixer: str
    """Kind of the mixer."""
    weights: Float[Array, "B N T S"]  # 0 where hidden
    visible: Bool[Array, "#B #N T S"]  # False where no weight is possible


def attention_maps(
    model: Model, params: Mapping[str, Any], **inputs: Any
) -> tuple[AttentionMap, ...]:
    """Return the attention maps of all layers that have attention weights.

    Args:
      model: Any model.
      params: Its parameters.
      **inputs: Arguments of the model by name: `tokens` [B, T], and others that it takes.

    Returns:
      One map for each layer and stage, in the order in which they run.

    Raises:
      ValueError: No layer has attention weights, there are more than `MAX_WEIGHTS`, or the model
        rejects the inputs.
    """
    for name, value in inputs.items():
        if value is not None and not (hasattr(value, "dtype") and value.dtype.kind != "U"):
            raise ValueError(f"{name} of type {type(value).__name__}: give an array")
    # Unrolled and without rematerialization, nothing is traced in a scan, so that the values of
    # the layers can leave the program.
    encoder_is_alone = not model.config.causal and model.config.encoder is None
    config = dataclasses.replace(model.config, layer_loop="unroll", remat="none")
    unrolled = model.clone(config=config)
    recorder = _Recorder("encoder" if encoder_is_alone else "decoder")

    def forward(params: Any, inputs: dict[str, jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        with nn.intercept_methods(recorder.intercept):
            unrolled.apply({"params": params}, **inputs)
        return [(layer.weights, layer.visible) for layer in recorder.maps]

    traced = jax.jit(forward).trace(params, inputs)
    if not recorder.maps:
        kinds = ", ".join(sorted(recorder.without_weights))
        raise ValueError(
            f"mixer {kinds}: has no attention weights to show; give a model with a mixer of "
            "softmax attention, such as full or sliding_window"
        )
    num_weights = sum(math.prod(weights.shape) for weights, _ in traced.out_info)
    if num_weights > MAX_WEIGHTS:
        share = math.sqrt(MAX_WEIGHTS / num_weights)
        raise ValueError(
            f"the maps of {len(recorder.maps)} layers: have {num_weights:,} weights, more than "
            f"{MAX_WEIGHTS:,}; shorten the text to {math.floor(100 * share)}% of its tokens"
        )
    arrays = traced.lower().compile()(params, inputs)
    return tuple(
        layer._replace(weights=weights, visible=visible)
        for layer, (weights, visible) in zip(recorder.maps, arrays, strict=True)
    )


class _Recorder:
    """Maps of a model's mixers, recorded while it is traced.

    Requested outputs (`transformer.taps`) hold neither masks nor the heads of sparse mixers.
    """

    def __init__(self, stage: Stage):
        self.maps: list[AttentionMap] = []
        self.without_weights: set[str] = set()
        self._stage = stage
        self._num_layers: collections.Counter[Stage] = collections.Counter()
        self._is_inside_mixer = False
        self._heads: Any = None

    def intercept(
        self,
        method: Callable[..., Any],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        """Call a method of a module; record what concerns attention."""
        module = context.module
        is_call = context.method_name == "__call__"
        if isinstance(module, Mixer) and context.method_name == "project":
            self._heads = method(*arguments, **options)
            return self._heads
        if isinstance(module, Encoder) and is_call:
            stage, self._stage = self._stage, "encoder"
            output = method(*arguments, **options)
            self._stage = stage
            return output
        # A mixer may be made of others; only the outer one is a layer.
        if isinstance(module, Mixer) and is_call and not self._is_inside_mixer:
            self._is_inside_mixer, self._heads = True, None
            output = self._call_mixer(method, module, *arguments, **options)
            self._is_inside_mixer = False
            return output
        return method(*arguments, **options)

    def _call_mixer(
        self, method: Callable[..., MixerOutput], mixer: Any, x: jax.Array, inputs: MixerInputs
    ) -> MixerOutput:
        """Call a mixer; record its weights, and the pairs that its mask and pattern both show."""
        stage: Stage = self._stage if inputs.memory is None else "cross"
        layer = self._num_layers[stage]
        self._num_layers[stage] += 1
        has_weights = mixer.abilities(mixer.config).weights
        if has_weights:
            inputs = inputs.replace(outputs=inputs.outputs | {"weights"})
        output = method(x, inputs)
        num_keys = x.shape[1] if inputs.memory is None else inputs.memory.shape[1]
        visible = dense_mask(inputs.mask, x.shape[1], num_keys)[:, None]
        has_pattern = self._heads is not None and hasattr(mixer, "select")
        if has_pattern and inputs.memory is None:
            visible = visible & mixer.select(self._heads, inputs)
        if has_weights:
            weights = output.aux.pop("weights")
            # A weight is never hidden, whatever a mixer of the user does with the mask.
            visible = visible | (weights > 0)
        elif has_pattern:
            weights = _weights_of_pattern(self._heads, visible)
        else:
            self.without_weights.add(mixer.config.kind)
            return output
        weights = weights.astype(jnp.float32)
        self.maps.append(AttentionMap(stage, layer, mixer.config.kind, weights, visible))
        return output


def _weights_of_pattern(
    heads: Any,  # q [B, T, N, H], k and v [B, S, K, H], and more
    visible: Bool[Array, "#B #N T S"],
) -> Float[Array, "B N T S"]:
    """Return softmax(q k^T / sqrt(H)) under a pattern of each head."""
    q, k, v = heads[:3]
    spec = ScoreSpec(scale=1 / math.sqrt(q.shape[-1]))
    batch, length, num_heads, _ = q.shape
    shape = (batch, num_heads, length, k.shape[1])
    # The mask of `attend` is shared by the heads, so each head becomes an example of its own.
    group = num_heads // k.shape[2]
    k, v = (jnp.repeat(array, group, axis=2) for array in (k, v))
    q, k, v = (x.swapaxes(1, 2).reshape(-1, x.shape[1], 1, x.shape[3]) for x in (q, k, v))
    mask = Mask(allowed=jnp.broadcast_to(visible, shape).reshape(-1, *shape[2:]))
    _, weights = attend_reference(q, k, v, mask, spec)
    return weights.reshape(shape)
