"""Encoder-decoder: an encoder reads the source, a decoder attends to its output."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Key

from transformer.attention.masks import Mask, MaskPattern, Segments, positions_or_arange
from transformer.attention.mixer import MixerInputs
from transformer.layers.basic import fold_in
from transformer.model_context import ModelContext
from transformer.models.block import Memory
from transformer.models.config import TransformerConfig
from transformer.models.embedding import (
    compute_logits,
    declare_embedding,
    declare_output_bias,
    declare_output_matrix,
    embed_tokens,
)
from transformer.models.model import (
    EXAMPLE_TOKENS,
    LOGITS,
    BackboneOutput,
    Model,
    ModelOutput,
    apply_layers,
    check_cache_inputs,
    check_cache_length,
    reject_explicit_axes,
)
from transformer.models.requests import make_taps
from transformer.models.stack import StackOutput, declare_shared_bias, init_cache
from transformer.taps import Edit, Outputs, Taps
from transformer.validation import check_positions, check_segments, check_shapes, check_token_ids


class EncoderDecoder(Model):
    """The transformer of Vaswani et al. 2017, or any other encoder-decoder.

    `config` describes the decoder, `config.encoder` what differs in the encoder. Blocks of the
    decoder have `cross_attention`, or a mixer that reads the memory itself.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.encoder is None:
            raise ValueError("model.encoder: is missing; give an EncoderConfig")
        if not any(block.needs_memory for block in self.config.layer_pattern):
            raise ValueError(
                "model.layer_pattern: no block attends to the source; give one cross_attention"
            )

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return EXAMPLE_TOKENS, EXAMPLE_TOKENS

    @nn.compact
    def __call__(
        self,
        source: Int[Array, "B S"] | None,  # None with `memory`, or a cache that has the memory
        tokens: Int[Array, "B T"] | None,  # input of the decoder; None: encode only
        *,
        memory: Float[Array, "B S D"] | None = None,  # output of the encoder, instead of `source`
        # 1, or documents; 0 is padding
        source_segments: Int[Array, "#B S"] | Bool[Array, "#B S"] | None = None,
        source_positions: Int[Array, "#B S"] | None = None,  # of `source`
        positions: Int[Array, "#B T"] | None = None,  # of `tokens`
        # 1, or documents as in the source; 0 is padding
        segments: Segments | None = None,
        cache: tuple[Any, ...] | None = None,
        dropout_rngs: Key[Array, "B"] | None = None,
        outputs: Outputs = LOGITS,
        edits: Mapping[str, Edit] | None = None,
    ) -> ModelOutput:
        """Return logits of the target; without `tokens`, `hidden` is the encoder's output.

        `Model` describes the other arguments.
        """
        config, context = self.config, self.context
        output = apply_both_sides(
            self,
            source,
            tokens,
            memory=memory,
            source_segments=source_segments,
            source_positions=source_positions,
            positions=positions,
            segments=segments,
            cache=cache,
            dropout_rngs=dropout_rngs,
            outputs=outputs,
            edits=edits,
        )
        if tokens is None:
            return ModelOutput(None, output.x, encoder_aux=output.encoder_aux)
        matrix = declare_output_matrix(self, output.embedding_table, config, context)
        bias = declare_output_bias(self, config)
        logits = None
        if "logits" in outputs:
            logits = compute_logits(output.x, matrix, config, context, bias)
        return ModelOutput(logits, output.x, output.cache, output.aux, output.encoder_aux)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int, source_length: int) -> tuple[Any, ...]:
        """Return an empty cache for `batch_size` targets of up to `length` tokens, by layer.

        ValueError: there are fewer learned positions than `length`.
        """
        check_cache_length(self.config, length)
        pattern = self.config.layer_pattern
        return init_cache(pattern, self.context, batch_size, length, source_length)


def apply_both_sides(
    model: Model,
    source: Int[Array, "B S"] | None,
    tokens: Int[Array, "B T"] | None,
    *,
    memory: Float[Array, "B S D"] | None = None,
    source_segments: Int[Array, "#B S"] | Bool[Array, "#B S"] | None = None,
    source_positions: Int[Array, "#B S"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    segments: Segments | None = None,
    cache: tuple[Any, ...] | None = None,
    dropout_rngs: Key[Array, "B"] | None = None,
    outputs: Outputs,
    edits: Mapping[str, Edit] | None = None,
) -> BackboneOutput:
    """Check the inputs of a model with an encoder, and apply encoder and decoder in its scope.

    The arguments are those of `EncoderDecoder`. Without `tokens`, `x` is the encoder's output.
    """
    examples = next((x for x in (tokens, source, memory) if x is not None), None)
    if examples is None:
        raise ValueError("neither source nor tokens: give at least one")
    check_shapes(
        source=(source, "B S | None", int),
        tokens=(tokens, "B T | None", int),
        memory=(memory, "B S D | None", float),
        source_segments=(source_segments, "B? S | None", int, bool),
        source_positions=(source_positions, "B? S | None", int),
        positions=(positions, "B? T | None", int),
        segments=(segments, "B? T | None", int, bool),
    )
    reject_explicit_axes(source=source, tokens=tokens)
    dropout_rngs = model.example_rngs(dropout_rngs, examples.shape[0])
    check_segments("source_segments", source_segments)
    check_segments("segments", segments)
    config, context = model.config, model.context
    assert config.encoder is not None  # checked by the model
    if cache is not None and tokens is not None:
        check_cache_inputs(cache, tokens, config.num_layers, positions, segments)
    taps = make_taps(config, outputs, edits)
    encoder_aux: Any = ()
    table = declare_embedding(model, "embedding", config.padded_vocab_size, context)
    source_table = table
    if config.encoder.vocab_size and source is not None:
        rows = config.pad_vocab_size(config.encoder.vocab_size)
        source_table = declare_embedding(model, "source_embedding", rows, context)
    if source is not None:
        vocab_size = config.source_vocab_size
        check_token_ids("source", source, vocab_size, config.pad_vocab_size(vocab_size))
        check_positions("source", source.shape[1], source_positions, config.source.max_length)
        # Streams 0 (encoder) and 1 (decoder): layer l of both would else drop the same entries.
        encoder = Encoder(config, context, name="encoder")
        encoded = encoder(
            source,
            source_table,
            source_positions,
            source_segments,
            fold_in(dropout_rngs, 0),
            outputs,
            taps.encoder,
        )
        memory, encoder_aux = encoded.x, encoded.aux
    if tokens is None:
        assert memory is not None  # `source` or `memory` is given
        return BackboneOutput(memory, None, (), table, dropout_rngs, encoder_aux)
    check_token_ids("tokens", tokens, config.vocab_size, config.padded_vocab_size)
    check_positions("tokens", tokens.shape[1], positions, config.max_length)
    positions = positions_or_arange(positions, tokens.shape[1])
    attended = Memory(memory, _source_mask(positions, segments, source_segments, tokens))
    decoder = Decoder(config, context, name="decoder")
    output = decoder(
        tokens,
        table,
        attended,
        positions,
        segments,
        cache,
        fold_in(dropout_rngs, 1),
        outputs,
        taps.layers,
    )
    return BackboneOutput(output.x, output.cache, output.aux, table, dropout_rngs, encoder_aux)


def _source_mask(
    positions: Int[Array, "#B T"],
    segments: Int[Array, "B T"] | None,
    source_segments: Int[Array, "B S"] | None,
    tokens: Int[Array, "B T"],
) -> Mask:
    """Return the mask of cross-attention: each token sees the source of its own document."""
    # With source segments only, they mark padding of the source: all targets belong to document 1.
    # With target segments only, they mark padding of the target: the source has none.
    if segments is None and source_segments is not None:
        segments = jnp.ones_like(tokens)
    if source_segments is None:
        segments = None
    return Mask(
        MaskPattern(ordered=False),
        positions=positions,
        segments=segments,
        key_segments=source_segments,
    )


class Encoder(nn.Module):
    """Embeddings and layers of the source."""

    config: TransformerConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B S"],
        embedding_table: Float[Array, "Vp D"],
        positions: Int[Array, "#B S"] | None,
        segments: Segments | None,
        dropout_rngs: Key[Array, "B"] | None,
        outputs: Outputs,
        taps: Taps | None = None,
    ) -> StackOutput:
        config, encoder = self.config, self.config.encoder
        assert encoder is not None  # checked by the model
        context = dataclasses.replace(self.context, num_layers=encoder.num_layers)
        positions = positions_or_arange(positions, tokens.shape[1])
        x = embed_tokens(
            self,
            embedding_table,
            tokens,
            positions,
            None,
            dropout_rngs,
            config=config.source,
            context=context,
        )
        mask = Mask(positions=positions, segments=segments)
        inputs = MixerInputs(
            positions,
            mask,
            dropout_rngs=dropout_rngs,
            shared_bias=declare_shared_bias(self, encoder.layer_pattern, context),
            taps=taps,
            outputs=outputs,
        )
        return apply_layers(encoder, config, context, x, inputs)


class Decoder(nn.Module):
    """Embeddings and layers of the target."""

    config: TransformerConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        embedding_table: Float[Array, "Vp D"],
        memory: Memory,
        positions: Int[Array, "#B T"],
        segments: Segments | None,
        cache: tuple[Any, ...] | None,
        dropout_rngs: Key[Array, "B"] | None,
        outputs: Outputs,
        taps: Taps | None = None,
    ) -> StackOutput:
        config, context = self.config, self.context
        x = embed_tokens(
            self,
            embedding_table,
            tokens,
            positions,
            None,
            dropout_rngs,
            config=config,
            context=context,
        )
        mask = Mask(MaskPattern(causal=config.causal), positions=positions, segments=segments)
        inputs = MixerInputs(
            positions,
            mask,
            cache=cache,
            dropout_rngs=dropout_rngs,
            shared_bias=declare_shared_bias(self, config.layer_pattern, context),
            taps=taps,
            outputs=outputs,
        )
        return apply_layers(config, config, context, x, inputs, memory)
