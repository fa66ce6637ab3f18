"""Encoder-decoder: an encoder reads the source, a decoder attends to its output."""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.masks import Mask, MaskPattern, positions_or_arange
from transformer.attention.mixer import MixerInputs, Outputs
from transformer.attention.position_bias import declare_shared_bias
from transformer.config import EncoderConfig, TransformerConfig
from transformer.inspection import Edit, Taps, make_taps
from transformer.layers.basic import declare_weight, fold_in
from transformer.layers.cross_attention import Memory
from transformer.layers.embedding import (
    compute_logits,
    declare_embedding,
    declare_output_matrix,
    embed_tokens,
)
from transformer.layers.stack import StackOutput
from transformer.layers.stack_weights import init_cache
from transformer.model_context import ModelContext
from transformer.models.input_checks import (
    check_cache_inputs,
    check_segments,
    check_tokens,
    resolve_dropout_rngs,
)
from transformer.models.model import (
    DEFAULT_OUTPUTS,
    EXAMPLE_TOKENS,
    LOGITS,
    Model,
    ModelOutput,
    apply_layers,
)
from transformer.shape_checks import check_shapes


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

    @property
    def encoder_config(self) -> EncoderConfig:
        assert self.config.encoder is not None  # checked in __post_init__
        return self.config.encoder

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return EXAMPLE_TOKENS, EXAMPLE_TOKENS

    @nn.compact
    def __call__(
        self,
        source: jax.Array | None,  # [B, S]; None with `memory`, or a cache that has the memory
        tokens: jax.Array | None,  # [B, T] input of the decoder; None: encode only
        *,
        memory: jax.Array | None = None,  # [B, S, D] output of the encoder, instead of `source`
        source_segments: jax.Array | None = None,  # [B, S] 1, or documents; 0 is padding
        source_positions: jax.Array | None = None,  # [B or 1, S] of `source`; None: 0 to S - 1
        positions: jax.Array | None = None,  # [B or 1, T] of `tokens`; None: 0 to T - 1
        segments: jax.Array | None = None,  # [B, T] 1, or documents as in the source; 0 is padding
        cache: tuple[Any, ...] | None = None,  # from `init_cache`; tokens go to `positions`
        dropout_rngs: jax.Array | None = None,  # [B] random keys, or Flax's rngs; None: no dropout
        outputs: Outputs = LOGITS,  # names of requested outputs
        edits: Mapping[str, Edit] | None = None,  # see `transformer.inspection`
    ) -> ModelOutput:
        """Return logits of the target; without `tokens`, `hidden` is the encoder's output.

        Raises:
          ValueError: If shapes disagree, or inputs exceed a table of learned positions.
        """
        if self.has_rng("dropout") or getattr(dropout_rngs, "ndim", 1) != 1:
            examples = source if tokens is None else tokens
            dropout_rngs = resolve_dropout_rngs(self, dropout_rngs, examples)
        check_shapes(
            source=(source, "B S | None", int),
            tokens=(tokens, "B T | None", int),
            memory=(memory, "B S D | None", float),
            source_segments=(source_segments, "B? S | None", int, bool),
            source_positions=(source_positions, "B? S | None", int),
            positions=(positions, "B? T | None", int),
            segments=(segments, "B? T | None", int, bool),
            dropout_rngs=(dropout_rngs, "B | None"),
            outputs=(outputs, Set),
        )
        check_segments("source_segments", source_segments)
        config = self.config
        if cache is not None:
            check_cache_inputs(cache, tokens, config.num_layers, positions, segments)
        taps = encoder_taps = None
        if edits or outputs - DEFAULT_OUTPUTS:
            taps, encoder_taps = make_taps(self, outputs, edits)
        encoder_aux: Any = ()
        table = declare_embedding(self, "embedding", config.padded_vocab_size, config)
        source_table = table
        if self.encoder_config.vocab_size and source is not None:
            rows = config.pad_vocab_size(self.encoder_config.vocab_size)
            source_table = declare_embedding(self, "source_embedding", rows, config)
        if source is not None:
            check_tokens(
                source, config, source_positions, vocab_size=self.encoder_config.vocab_size
            )
            # Streams 0 (encoder) and 1 (decoder): layer l of both would else drop the same entries.
            encoder = Encoder(config, self.context, name="encoder")
            rngs = fold_in(dropout_rngs, 0)
            places = source_positions, source_segments
            encoded = encoder(source, source_table, *places, rngs, outputs, encoder_taps)
            memory, encoder_aux = encoded.x, encoded.aux
        if tokens is None:
            if memory is None:
                raise ValueError("neither source nor tokens: give at least one")
            return ModelOutput(None, memory, encoder_aux=encoder_aux)
        check_tokens(tokens, config, positions, segments)
        positions = positions_or_arange(positions, tokens.shape[1])
        attended = Memory(memory, _source_mask(positions, segments, source_segments, tokens))
        decoder = Decoder(config, self.context, name="decoder")
        rngs = fold_in(dropout_rngs, 1)
        output = decoder(tokens, table, attended, positions, segments, cache, rngs, outputs, taps)
        matrix, bias = declare_output_matrix(self, table, config), None
        if config.logit_bias:
            bias = declare_weight(
                self,
                "output_bias",
                outputs={"vocab": config.padded_vocab_size},
                init=nn.initializers.zeros,
                dtype=config.precision.parameters,
            )
        logits = None
        if "logits" in outputs:
            logits = compute_logits(output.x, matrix, config, self.context, bias)
        return ModelOutput(logits, output.x, output.cache, output.aux, encoder_aux)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int, source_length: int) -> tuple[Any, ...]:
        """Return an empty cache for `batch_size` targets of up to `length` tokens, by layer."""
        pattern = self.config.layer_pattern
        return init_cache(pattern, self.context, batch_size, length, source_length)


def _source_mask(
    positions: jax.Array,  # [B or 1, T]
    segments: jax.Array | None,  # [B, T]
    source_segments: jax.Array | None,  # [B, S]
    tokens: jax.Array,  # [B, T]
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
        tokens: jax.Array,  # [B, S]
        embedding_table: jax.Array,  # [V padded, D]
        positions: jax.Array | None,  # [B or 1, S]
        segments: jax.Array | None,  # [B, S]
        dropout_rngs: jax.Array | None,  # [B]
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
            config=config,
            context=context,
        )
        mask = Mask(positions=positions, segments=segments)
        inputs = MixerInputs(positions, mask, dropout_rngs=dropout_rngs, taps=taps, outputs=outputs)
        shared_bias = declare_shared_bias(self, encoder.layer_pattern, context)
        inputs = inputs.replace(shared_bias=shared_bias)
        return apply_layers(encoder, config, context, x, inputs)


class Decoder(nn.Module):
    """Embeddings and layers of the target."""

    config: TransformerConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,  # [B, T]
        embedding_table: jax.Array,  # [V padded, D]
        memory: Memory,
        positions: jax.Array,  # [B or 1, T]
        segments: jax.Array | None,  # [B, T]
        cache: tuple[Any, ...] | None,
        dropout_rngs: jax.Array | None,  # [B]
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
            positions, mask, cache=cache, dropout_rngs=dropout_rngs, taps=taps, outputs=outputs
        )
        shared_bias = declare_shared_bias(self, config.layer_pattern, context)
        inputs = inputs.replace(shared_bias=shared_bias)
        return apply_layers(config, config, context, x, inputs, memory)
