"""The encoder-decoder that writes all words at once, each without knowing the others.

Given the source, its outputs are independent of one another: decoding is one parallel pass, and
what two words ought to agree on, they cannot (Gu et al. 2018, section 3.1). It is here to be
compared.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.block import Memory
from transformer.checks import check_at_least
from transformer.dropout import fold_in
from transformer.embedding import declare_embedding
from transformer.encoder_decoder import Decoder, Encoder
from transformer.linear import apply_linear
from transformer.masks import Mask, MaskPattern
from transformer.mixers import Outputs
from transformer.model import (
    EXAMPLE_TOKENS,
    LOGITS,
    Model,
    ModelOutput,
    check_tokens,
    compute_logits,
    declare_output_matrix,
)
from transformer.pooling import masked_mean


class NonAutoregressive(Model):
    """Gu et al. 2018, with a predicted length in place of fertilities (Lee et al. 2018).

    The decoder reads copies of the source's words, spread evenly over the target, without a causal
    mask. `config` is that of an `EncoderDecoder` with `causal` off.
    """

    max_length_difference: int = 20  # R: lengths from S - R to S + R can be predicted
    length_loss_weight: float = 0.1  # of the loss of lengths, beside that of words

    def __post_init__(self) -> None:
        if self.config.encoder is None:
            raise ValueError("model.encoder: is missing; give an EncoderConfig")
        if self.config.causal:
            raise ValueError(
                "model.causal True: all words are written at once, so each may see all; "
                "set it to False"
            )
        check_at_least("length_range", self.max_length_difference, 0)
        super().__post_init__()

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return EXAMPLE_TOKENS, EXAMPLE_TOKENS

    @nn.compact
    def __call__(
        self,
        source: jax.Array,  # [B, S]
        tokens: jax.Array | None,  # [B, T] of which only the number counts; None: lengths alone
        *,
        source_segments: jax.Array | None = None,  # [B, S] 1; 0 is padding
        segments: jax.Array | None = None,  # [B, T] 1; 0 is padding
        dropout_rngs: jax.Array | None = None,  # [B] random keys; None: no dropout
        outputs: Outputs = LOGITS,
    ) -> ModelOutput:
        """Without `tokens`, `logits` [B, 2 R + 1] are of lengths S - R to S + R.

        Each row has one source and one target. Raises ValueError for inputs too long.
        """
        config = self.config
        assert config.encoder is not None  # as checked when built
        check_tokens(source, config)
        there = jnp.ones_like(source) if source_segments is None else source_segments
        words = declare_embedding(self, "embedding", config.padded_vocab_size, config)
        source_words = words
        if config.encoder.vocab_size:
            rows = config.pad_vocab_size(config.encoder.vocab_size)
            source_words = declare_embedding(self, "source_embedding", rows, config)
        encoder = Encoder(config, self.context, name="encoder")
        memory = encoder(source, source_words, there, fold_in(dropout_rngs, 0), outputs).x
        length_logits = self.length_logits(memory, there)
        if tokens is None:
            return ModelOutput(length_logits, memory)
        check_tokens(tokens, config)
        written = jnp.ones_like(tokens) if segments is None else segments
        copied = copy_source_uniformly(
            source, jnp.sum(there != 0, axis=1), jnp.sum(written != 0, axis=1), tokens
        )
        positions = jnp.arange(tokens.shape[1])[None, :]
        mask = Mask(MaskPattern(ordered=False), segments=jnp.ones_like(tokens), key_segments=there)
        decoder = Decoder(config, self.context, name="decoder")
        looks = Memory(memory, mask)
        output = decoder(
            copied, source_words, looks, positions, written, None, fold_in(dropout_rngs, 1), outputs
        )
        matrix = words.T if config.tie_embeddings else declare_output_matrix(self, config)
        logits = compute_logits(output.x, matrix, self) if "logits" in outputs else None
        aux = output.aux
        if "losses" in outputs:
            loss = self.length_loss_weight * length_loss(length_logits, there, written)
            aux = (*aux, {"loss/length": loss})
        return ModelOutput(logits, output.x, None, aux)

    def length_logits(
        self,
        memory: jax.Array,  # [B, S, D]
        source_segments: jax.Array,  # [B, S]
    ) -> jax.Array:  # [B, 2 R + 1] float32
        """Logits of how much longer the target is than the source, told from the mean."""
        embed, outputs = (
            {"embed": self.config.d_model},
            {"lengths": 2 * self.max_length_difference + 1},
        )
        mean = masked_mean(memory, source_segments)
        logits = apply_linear(self, "length", mean, embed, outputs, self.context, bias=True)
        return logits[:, 0].astype(jnp.float32)


def copy_source_uniformly(
    source: jax.Array,  # [B, S]
    source_lengths: jax.Array,  # [B] of the sources
    target_lengths: jax.Array,  # [B] of the targets
    target_tokens: jax.Array,  # [B, T]
) -> jax.Array:  # [B, T]
    """Word floor(t S / T) of the source at position t (Gu et al. 2018, section 3.2)."""
    positions = jnp.arange(target_tokens.shape[1])[None, :]
    index = positions * source_lengths[:, None] // jnp.maximum(target_lengths, 1)[:, None]
    return jnp.take_along_axis(source, jnp.minimum(index, source.shape[1] - 1), axis=1)


def length_loss(
    logits: jax.Array,  # [B, 2 R + 1]
    source_segments: jax.Array,  # [B, S]
    target_segments: jax.Array,  # [B, T]
) -> jax.Array:  # the mean over rows that have a target
    """Cross entropy of the differences in length; those beyond R count as R."""
    difference = jnp.sum(target_segments != 0, axis=1) - jnp.sum(source_segments != 0, axis=1)
    reach = logits.shape[1] // 2
    chosen = jnp.clip(difference + reach, 0, 2 * reach)
    chances = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), chosen[:, None], axis=1)
    real = jnp.any(target_segments != 0, axis=1)
    return -jnp.sum(chances[:, 0] * real) / jnp.maximum(jnp.sum(real), 1)


def predict_lengths(
    logits: jax.Array,  # [B, 2 R + 1]
    source_lengths: jax.Array,  # [B] of the sources
) -> jax.Array:  # [B] at least 1
    """The length of each target."""
    return jnp.maximum(source_lengths + jnp.argmax(logits, axis=1) - logits.shape[1] // 2, 1)
