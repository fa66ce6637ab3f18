"""The encoder-decoder that writes all words at once, each without knowing the others.

Given the source, its outputs are independent of one another: decoding is one parallel pass, and
what two words ought to agree on, they cannot (Gu et al. 2018, section 3.1). It is here to be
compared.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.block import Memory
from transformer.checks import check_least
from transformer.dropout import fold
from transformer.embedding import word_table
from transformer.encoder_decoder import Decoder, Encoder
from transformer.linear import linear
from transformer.masks import Mask, Pattern
from transformer.mixers import Outputs
from transformer.model import (
    LOGITS,
    TOKENS,
    Model,
    ModelOutput,
    check_tokens,
    output_table,
    vocabulary_logits,
)
from transformer.pooling import mean_of_real


class NonAutoregressive(Model):
    """Gu et al. 2018, with a predicted length in place of fertilities (Lee et al. 2018).

    The decoder reads copies of the source's words, spread evenly over the target, without a causal
    mask. `config` is that of an `EncoderDecoder` with `causal` off.
    """

    length_range: int = 20  # R: lengths from S - R to S + R can be predicted
    length_weight: float = 0.1  # of the loss of lengths, beside that of words

    def __post_init__(self) -> None:
        if self.config.encoder is None:
            raise ValueError("model.encoder: is missing; give an EncoderConfig")
        if self.config.causal:
            raise ValueError(
                "model.causal True: all words are written at once, so each may see all; "
                "set it to False"
            )
        check_least("length_range", self.length_range, 0)
        super().__post_init__()

    @nn.nowrap
    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return TOKENS, TOKENS

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
        words = word_table(self, "embedding", config.vocab_rows, config)
        source_words = words
        if config.encoder.vocab_size:
            rows = config.padded(config.encoder.vocab_size)
            source_words = word_table(self, "source_embedding", rows, config)
        encoder = Encoder(config, self.shared, name="encoder")
        memory = encoder(source, source_words, there, fold(dropout_rngs, 0), outputs).x
        length_logits = self.lengths(memory, there)
        if tokens is None:
            return ModelOutput(length_logits, memory)
        check_tokens(tokens, config)
        written = jnp.ones_like(tokens) if segments is None else segments
        copied = evenly(source, jnp.sum(there != 0, axis=1), jnp.sum(written != 0, axis=1), tokens)
        positions = jnp.arange(tokens.shape[1])[None, :]
        mask = Mask(Pattern(ordered=False), segments=jnp.ones_like(tokens), key_segments=there)
        decoder = Decoder(config, self.shared, name="decoder")
        looks = Memory(memory, mask)
        output = decoder(
            copied, source_words, looks, positions, written, None, fold(dropout_rngs, 1), outputs
        )
        matrix = words.T if config.tied else output_table(self, config)
        logits = vocabulary_logits(output.x, matrix, self) if "logits" in outputs else None
        aux = output.aux
        if "losses" in outputs:
            loss = self.length_weight * length_loss(length_logits, there, written)
            aux = (*aux, {"loss/length": loss})
        return ModelOutput(logits, output.x, None, aux)

    def lengths(
        self,
        memory: jax.Array,  # [B, S, D]
        there: jax.Array,  # [B, S]
    ) -> jax.Array:  # [B, 2 R + 1] float32
        """Logits of how much longer the target is than the source, told from the mean."""
        embed, outputs = {"embed": self.config.width}, {"lengths": 2 * self.length_range + 1}
        mean = mean_of_real(memory, there)
        logits = linear(self, "length", mean, embed, outputs, self.shared, bias=True)
        return logits[:, 0].astype(jnp.float32)


def evenly(
    source: jax.Array,  # [B, S]
    lengths: jax.Array,  # [B] of the sources
    targets: jax.Array,  # [B] of the targets
    like: jax.Array,  # [B, T]
) -> jax.Array:  # [B, T]
    """Word floor(t S / T) of the source at position t (Gu et al. 2018, section 3.2)."""
    positions = jnp.arange(like.shape[1])[None, :]
    index = positions * lengths[:, None] // jnp.maximum(targets, 1)[:, None]
    return jnp.take_along_axis(source, jnp.minimum(index, source.shape[1] - 1), axis=1)


def length_loss(
    logits: jax.Array,  # [B, 2 R + 1]
    there: jax.Array,  # [B, S]
    written: jax.Array,  # [B, T]
) -> jax.Array:  # the mean over rows that have a target
    """Cross entropy of the differences in length; those beyond R count as R."""
    difference = jnp.sum(written != 0, axis=1) - jnp.sum(there != 0, axis=1)
    reach = logits.shape[1] // 2
    chosen = jnp.clip(difference + reach, 0, 2 * reach)
    chances = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), chosen[:, None], axis=1)
    real = jnp.any(written != 0, axis=1)
    return -jnp.sum(chances[:, 0] * real) / jnp.maximum(jnp.sum(real), 1)


def likeliest_lengths(
    logits: jax.Array,  # [B, 2 R + 1]
    lengths: jax.Array,  # [B] of the sources
) -> jax.Array:  # [B] at least 1
    """The length of each target."""
    return jnp.maximum(lengths + jnp.argmax(logits, axis=1) - logits.shape[1] // 2, 1)
