"""The encoder-decoder: one stack reads the source, another writes the target looking at it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.base import Outputs
from transformer.attention.masks import Mask, MaskPattern
from transformer.config import EncoderConfig, TransformerConfig
from transformer.context import ModelContext
from transformer.layers import stack
from transformer.layers.block import Memory
from transformer.layers.dropout import fold_in
from transformer.layers.embedding import declare_embedding, embed_tokens
from transformer.layers.stack import StackOutput
from transformer.models.base import (
    EXAMPLE_TOKENS,
    LOGITS,
    Model,
    ModelOutput,
    apply_layers,
    check_cache_inputs,
    check_tokens,
    compute_logits,
    declare_output_matrix,
    positions_or_arange,
)


class EncoderDecoder(Model):
    """The transformer of Vaswani et al. 2017, and any other that encodes and decodes.

    `config` is the decoder's, `config.encoder` the rest of the encoder's. The decoder's blocks have
    `cross` attention, or a mixer that reads the memory itself.
    """

    def __post_init__(self) -> None:
        if self.config.encoder is None:
            raise ValueError("model.encoder: is missing; give an EncoderConfig")
        if not any(block.needs_memory for block in self.config.layer_pattern):
            raise ValueError("model.pattern: no block looks at the source; give one a cross mixer")
        super().__post_init__()

    @property
    def encoder_config(self) -> EncoderConfig:
        assert self.config.encoder is not None  # as checked when built
        return self.config.encoder

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return EXAMPLE_TOKENS, EXAMPLE_TOKENS

    @nn.compact
    def __call__(
        self,
        source: jax.Array | None,  # [B, S]; None with a memory, or with a cache that has read it
        tokens: jax.Array | None,  # [B, T] what the decoder reads; None: encode only
        *,
        memory: jax.Array | None = None,  # [B, S, D] an encoder's output, in place of `source`
        source_segments: jax.Array | None = None,  # [B, S] 1, or documents; 0 is padding
        positions: jax.Array | None = None,  # [B, T] of the tokens; None: 0 to T - 1
        segments: jax.Array | None = None,  # [B, T] 1, or documents as in the source; 0 is padding
        cache: tuple[Any, ...] | None = None,  # from `init_cache`: positions says where tokens go
        dropout_rngs: jax.Array | None = None,  # [B] random keys; None: no dropout
        outputs: Outputs = LOGITS,
    ) -> ModelOutput:
        """Without `tokens`, `hidden` is the memory. Raises ValueError for inputs too long."""
        config = self.config
        check_cache_inputs(cache, positions, segments)
        words = declare_embedding(self, "embedding", config.padded_vocab_size, config)
        source_words = words
        if self.encoder_config.vocab_size and source is not None:
            rows = config.pad_vocab_size(self.encoder_config.vocab_size)
            source_words = declare_embedding(self, "source_embedding", rows, config)
        if source is not None:
            check_tokens(source, config)
            encoder = Encoder(config, self.context, name="encoder")
            memory = encoder(
                source, source_words, source_segments, fold_in(dropout_rngs, 0), outputs
            ).x
        if tokens is None:
            if memory is None:
                raise ValueError("neither source nor tokens: give at least one")
            return ModelOutput(None, memory)
        check_tokens(tokens, config, positions)
        positions = positions_or_arange(positions, tokens)
        looks = Memory(memory, _over_source(positions, segments, source_segments, tokens))
        decoder = Decoder(config, self.context, name="decoder")
        output = decoder(
            tokens, words, looks, positions, segments, cache, fold_in(dropout_rngs, 1), outputs
        )
        matrix = words.T if config.tie_embeddings else declare_output_matrix(self, config)
        logits = compute_logits(output.x, matrix, self) if "logits" in outputs else None
        return ModelOutput(logits, output.x, output.cache, output.aux)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int, source_length: int) -> tuple[Any, ...]:
        """An empty cache for `batch_size` targets of up to `length` tokens: one entry a layer."""
        return stack.init_cache(
            self.config.layer_pattern, self.context, batch_size, length, source_length
        )


def _over_source(
    positions: jax.Array,  # [B or 1, T]
    segments: jax.Array | None,  # [B, T]
    source_segments: jax.Array | None,  # [B, S]
    tokens: jax.Array,  # [B, T]
) -> Mask:
    """What of the source each token of the target sees: all that is of its document."""
    if segments is None and source_segments is not None:
        segments = jnp.ones_like(tokens)
    return Mask(
        MaskPattern(ordered=False),
        positions=positions,
        segments=segments,
        key_segments=source_segments,
    )


class Encoder(nn.Module):
    """Embeds and reads the source."""

    config: TransformerConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,  # [B, S]
        words: jax.Array,  # [V padded, D]
        segments: jax.Array | None,  # [B, S]
        dropout_rngs: jax.Array | None,  # [B]
        outputs: Outputs,
    ) -> StackOutput:
        config, part = self.config, self.config.encoder
        assert part is not None  # as the model has checked
        shared = dataclasses.replace(self.context, num_layers=part.num_layers)
        positions = positions_or_arange(None, tokens)
        given: dict[str, Any] = dict(positions=positions, dropout_rngs=dropout_rngs)
        x = embed_tokens(
            self, words, tokens, token_types=None, config=config, context=shared, **given
        )
        mask = Mask(positions=positions, segments=segments)
        return apply_layers(part, config, shared, x, mask=mask, outputs=outputs, **given)


class Decoder(nn.Module):
    """Embeds what has been written, and reads it beside the memory."""

    config: TransformerConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,  # [B, T]
        words: jax.Array,  # [V padded, D]
        memory: Memory,
        positions: jax.Array,  # [B or 1, T]
        segments: jax.Array | None,  # [B, T]
        cache: tuple[Any, ...] | None,
        dropout_rngs: jax.Array | None,  # [B]
        outputs: Outputs,
    ) -> StackOutput:
        config, shared = self.config, self.context
        given: dict[str, Any] = dict(positions=positions, dropout_rngs=dropout_rngs)
        x = embed_tokens(
            self, words, tokens, token_types=None, config=config, context=shared, **given
        )
        mask = Mask(MaskPattern(causal=config.causal), positions=positions, segments=segments)
        more = dict(mask=mask, memory=memory, cache=cache, outputs=outputs)
        return apply_layers(config, config, shared, x, **given, **more)
