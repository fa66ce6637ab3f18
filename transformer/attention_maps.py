"""Attention maps: the weights of every layer and head of a model, and the pairs that it hides.

    for each in attention_maps(model, params, tokens=tokens):
        each.stage, each.layer, each.weights, each.visible

Unlike the output `weights` (`transformer.inspection`), a map also says which pairs of tokens the
mask and a sparse pattern hide, and sparse mixers that never hold weights have one: their result is
softmax attention under their pattern by the contract that `check_mixer` tests.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.masks import Mask, dense_mask
from transformer.attention.mixer import Mixer, MixerInputs, MixerOutput
from transformer.attention.reference import ScoreSpec, attend_reference
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
    weights: jax.Array  # [B, N, T, S]; 0 where hidden
    visible: jax.Array  # [B or 1, N or 1, T, S] booleans: False where no weight is possible


class LayerId(NamedTuple):
    """Place of a map in the model, known while tracing."""

    stage: Stage
    layer: int
    mixer: str


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
        recorder.clear()
        with nn.intercept_methods(recorder.intercept):
            unrolled.apply({"params": params}, **inputs)
        return recorder.arrays

    traced = jax.jit(forward).trace(params, inputs)
    if not recorder.places:
        kinds = ", ".join(sorted(recorder.without_weights))
        raise ValueError(
            f"mixer {kinds}: has no attention weights to show; give a model with a mixer of "
            "softmax attention, such as full or sliding_window"
        )
    num_weights = sum(math.prod(weights.shape) for weights, _ in traced.out_info)
    if num_weights > MAX_WEIGHTS:
        share = math.sqrt(MAX_WEIGHTS / num_weights)
        raise ValueError(
            f"the maps of {len(recorder.places)} layers: have {num_weights:,} weights, more than "
            f"{MAX_WEIGHTS:,}; shorten the text to {math.floor(100 * share)}% of its tokens"
        )
    arrays = traced.lower().compile()(params, inputs)
    places = zip(recorder.places, arrays, strict=True)
    return tuple(AttentionMap(*place, *both) for place, both in places)


class _Recorder:
    """Record the weights of each mixer while a model is traced."""

    def __init__(self, stage: Stage):
        self._own_stage = stage
        self.clear()

    def clear(self) -> None:
        """Forget what an earlier trace has recorded."""
        self.places: list[LayerId] = []
        self.arrays: list[tuple[jax.Array, jax.Array]] = []
        self.without_weights: set[str] = set()
        self._stage = self._own_stage
        self._counts: dict[Stage, int] = {}
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
        from transformer.models.encoder_decoder import Encoder

        module = context.module
        if isinstance(module, Mixer) and context.method_name == "project":
            self._heads = method(*arguments, **options)
            return self._heads
        if context.method_name != "__call__":
            return method(*arguments, **options)
        if isinstance(module, Encoder):
            self._stage = "encoder"
            output = method(*arguments, **options)
            self._stage = self._own_stage
            return output
        # A mixer may be made of others; only the outer one is a layer.
        if isinstance(module, Mixer) and not self._is_inside_mixer:
            self._is_inside_mixer, self._heads = True, None
            output = self._call_mixer(method, module, *arguments, **options)
            self._is_inside_mixer = False
            return output
        return method(*arguments, **options)

    def _call_mixer(
        self, method: Callable[..., MixerOutput], mixer: Any, x: jax.Array, inputs: MixerInputs
    ) -> MixerOutput:
        kind = mixer.config.kind
        stage: Stage = self._stage if inputs.memory is None else "cross"
        layer = self._counts.get(stage, 0)
        self._counts[stage] = layer + 1
        weights = None
        if mixer.abilities(mixer.config).weights:
            output = method(x, inputs.replace(outputs=inputs.outputs | {"weights"}))
            weights = output.aux.pop("weights")
        else:
            output = method(x, inputs)
        visible = self._visible_pairs(mixer, inputs, x.shape[1], weights)
        if weights is None and self._heads is not None and hasattr(mixer, "select"):
            weights = _weights_of_pattern(self._heads, visible)
        if weights is None:
            self.without_weights.add(kind)
        else:
            self.places.append(LayerId(stage, layer, kind))
            self.arrays.append((weights.astype(jnp.float32), visible))
        return output

    def _visible_pairs(
        self, mixer: Any, inputs: MixerInputs, num_queries: int, weights: jax.Array | None
    ) -> jax.Array:  # [B or 1, N or 1, T, S] booleans
        """Return the pairs that the mask and the mixer's own pattern both show."""
        num_keys = num_queries if inputs.memory is None else inputs.memory.shape[1]
        visible = dense_mask(inputs.mask, num_queries, num_keys)[:, None]
        if inputs.memory is None and self._heads is not None and hasattr(mixer, "select"):
            visible = visible & mixer.select(self._heads, inputs)
        # A weight is never hidden, whatever a mixer of the user does with the mask.
        return visible if weights is None else visible | (weights > 0)


def _weights_of_pattern(
    heads: Any,  # q [B, T, N, H], k and v [B, S, K, H], and more
    visible: jax.Array,  # [B or 1, N or 1, T, S]
) -> jax.Array:  # [B, N, T, S]
    """Return softmax(q k^T / sqrt(H)) under a pattern of each head."""
    q, k, v = heads[:3]
    spec = ScoreSpec(scale=1 / math.sqrt(q.shape[-1]))
    batch, length, num_heads, _ = q.shape
    shape = (batch, num_heads, length, k.shape[1])
    # The mask of `attend` is shared by the heads, so each head becomes an example of its own.
    group = num_heads // k.shape[2]
    k, v = (jnp.repeat(each, group, axis=2) for each in (k, v))
    q, k, v = (x.swapaxes(1, 2).reshape(-1, x.shape[1], 1, x.shape[3]) for x in (q, k, v))
    mask = Mask(allowed=jnp.broadcast_to(visible, shape).reshape(-1, *shape[2:]))
    _, weights = attend_reference(q, k, v, mask, spec)
    return weights.reshape(shape)
