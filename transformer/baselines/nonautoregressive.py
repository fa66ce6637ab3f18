"""Non-autoregressive encoder-decoder: predict all target tokens in one parallel pass.

Given the source, the target tokens are predicted independently, so they cannot agree with each
other on one of several valid outputs (Gu et al. 2018, section 3.1). Included as a baseline.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Float32, Int, Key, Real

from transformer.attention.masks import Mask, MaskPattern
from transformer.generation.batches import (
    PROMPT_LENGTH_MULTIPLE,
    Tokens,
    batches_by_length,
    bucket_length,
    check_sources,
    pad_right,
    segments_of_lengths,
)
from transformer.layers.basic import apply_linear, fold_in
from transformer.model_context import replicate
from transformer.models.block import Memory
from transformer.models.embedding import compute_logits, declare_embedding, declare_output_matrix
from transformer.models.encoder_decoder import Decoder, Encoder
from transformer.models.heads import masked_mean
from transformer.models.model import (
    EXAMPLE_TOKENS,
    LOGITS,
    Model,
    ModelOutput,
    reject_explicit_axes,
)
from transformer.models.unstacked import Params
from transformer.taps import Outputs
from transformer.validation import (
    check_integer,
    check_positions,
    check_segments,
    check_shapes,
    check_token_ids,
)


class NonAutoregressive(Model):
    """Non-autoregressive translation model (Gu et al. 2018).

    It predicts the target length instead of fertilities (Lee et al. 2018). The decoder reads a copy
    of the source, stretched to the target length, without a causal mask. `config` is that of an
    `EncoderDecoder` with `causal=False`.
    """

    max_length_difference: int = 20  # R: lengths from S - R to S + R can be predicted
    length_loss_weight: float = 0.1  # weight of the length loss, relative to the token loss

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.encoder is None:
            raise ValueError("model.encoder: is missing; give an EncoderConfig")
        if self.config.causal:
            raise ValueError(
                "model.causal True: a non-autoregressive model predicts all tokens at once, each "
                "from all others; set it to False"
            )
        check_integer("max_length_difference", self.max_length_difference, 0)

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return EXAMPLE_TOKENS, EXAMPLE_TOKENS

    @nn.compact
    def __call__(
        self,
        source: Int[Array, "B S"],
        tokens: Int[Array, "B T"] | None,  # read only for its shape; None: lengths only
        *,
        source_segments: Int[Array, "#B S"] | Bool[Array, "#B S"] | None = None,  # 1; 0 is padding
        segments: Int[Array, "#B T"] | Bool[Array, "#B T"] | None = None,  # 1; 0 is padding
        dropout_rngs: Key[Array, "B"] | None = None,  # None: no dropout
        outputs: Outputs = LOGITS,
    ) -> ModelOutput:
        """Return token logits; if `tokens` is None, length logits [B, 2 R + 1] of S - R to S + R.

        Each row has one source and one target.

        Raises:
          ValueError: If shapes or dtypes disagree, or inputs exceed the learned positions.
        """
        check_shapes(
            source=(source, "B S", int),
            tokens=(tokens, "B T | None", int),
            source_segments=(source_segments, "B S | None", int, bool),
            segments=(segments, "B T | None", int, bool),
        )
        config, context = self.config, self.context
        reject_explicit_axes(source=source, tokens=tokens)
        assert config.encoder is not None  # as checked when built
        check_segments("source_segments", source_segments)
        check_token_ids("source", source, config.source_vocab_size)
        check_positions("source", source.shape[1], None, config.max_length)
        source_is_token = jnp.ones_like(source) if source_segments is None else source_segments
        embedding = declare_embedding(self, "embedding", config.padded_vocab_size, context)
        source_embedding = embedding
        if config.encoder.vocab_size:
            rows = config.pad_vocab_size(config.encoder.vocab_size)
            source_embedding = declare_embedding(self, "source_embedding", rows, context)
        encoder = Encoder(config, self.context, name="encoder")
        memory = encoder(
            source, source_embedding, None, source_is_token, fold_in(dropout_rngs, 0), outputs
        ).x
        length_logits = self.length_logits(memory, source_is_token)
        if tokens is None:
            return ModelOutput(length_logits, memory)
        check_segments("segments", segments)
        check_token_ids("tokens", tokens, config.vocab_size)
        check_positions("tokens", tokens.shape[1], None, config.max_length)
        target_segments = jnp.ones_like(tokens) if segments is None else segments
        copied_source = copy_source_uniformly(
            source,
            jnp.sum(source_is_token != 0, axis=1),
            jnp.sum(target_segments != 0, axis=1),
            tokens,
        )
        positions = jnp.arange(tokens.shape[1])[None, :]
        # Padded targets see the source too, so no row is empty; nothing reads their outputs.
        mask = Mask(
            MaskPattern(ordered=False), segments=jnp.ones_like(tokens), key_segments=source_is_token
        )
        decoder = Decoder(config, self.context, name="decoder")
        output = decoder(
            copied_source,
            source_embedding,
            Memory(memory, mask),
            positions,
            target_segments,
            None,
            fold_in(dropout_rngs, 1),
            outputs,
        )
        matrix = declare_output_matrix(self, embedding, config, context)
        logits = None
        if "logits" in outputs:
            logits = compute_logits(output.x, matrix, config, self.context, bias=None)
        aux = output.aux
        if "losses" in outputs:
            loss = self.length_loss_weight * length_loss(
                length_logits, source_is_token, target_segments
            )
            aux = (*aux, {"loss/length": loss})
        return ModelOutput(logits, output.x, None, aux)

    def length_logits(
        self,
        memory: Float[Array, "B S D"],
        source_segments: Int[Array, "B S"],
    ) -> Float32[Array, "B twice_R_plus_1"]:
        """Return logits of target length minus source length, from the mean memory vector."""
        embed = {"embed": self.config.d_model}
        differences = {"length_logits": 2 * self.max_length_difference + 1}
        mean = masked_mean(memory, source_segments)
        logits = apply_linear(self, "length", mean, embed, differences, self.context, bias=True)
        return logits[:, 0].astype(jnp.float32)


def copy_source_uniformly(
    source: Int[Array, "B S"],
    source_lengths: Int[Array, "B"],  # of the sources
    target_lengths: Int[Array, "B"],  # of the targets
    target_tokens: Int[Array, "B T"],
) -> Int[Array, "B T"]:
    """Return source token floor(t S / T) at position t (Gu et al. 2018, section 3.2)."""
    positions = jnp.arange(target_tokens.shape[1])[None, :]
    index = positions * source_lengths[:, None] // jnp.maximum(target_lengths, 1)[:, None]
    return jnp.take_along_axis(source, jnp.minimum(index, source.shape[1] - 1), axis=1)


def length_loss(
    logits: Float[Array, "B twice_R_plus_1"],
    source_segments: Int[Array, "B S"],
    target_segments: Int[Array, "B T"],
) -> jax.Array:  # the mean over rows that have a target
    """Compute the cross entropy of the length difference, clipped to [-R, R]."""
    check_shapes(
        logits=(logits, "B lengths", float),
        source_segments=(source_segments, "B S", int, bool),
        target_segments=(target_segments, "B T", int, bool),
    )
    # Targets that are too short or too long teach the nearest length that can be predicted.
    difference = jnp.sum(target_segments != 0, axis=1) - jnp.sum(source_segments != 0, axis=1)
    max_difference = logits.shape[1] // 2
    target = jnp.clip(difference + max_difference, 0, 2 * max_difference)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), target[:, None], axis=1)
    has_target = jnp.any(target_segments != 0, axis=1)
    return -jnp.sum(log_probs[:, 0] * has_target) / jnp.maximum(jnp.sum(has_target), 1)


def predict_lengths(
    logits: Real[Array, "B twice_R_plus_1"],
    source_lengths: Int[Array, "B"],  # of the sources
) -> Int[Array, "B"]:  # at least 1
    """Return the most likely target lengths."""
    return jnp.maximum(source_lengths + jnp.argmax(logits, axis=1) - logits.shape[1] // 2, 1)


def translate_nonautoregressive(
    model: NonAutoregressive,
    params: Params,
    sources: Sequence[Tokens],  # B of them, of any lengths
    *,
    stop: int | Sequence[int],
    batch_size: int = 32,
) -> list[list[int]]:
    """Return the most likely token at each position of the most likely length, up to a stop token.

    Sources are sorted by length and processed `batch_size` at a time. Results are in input order.

    Raises:
      ValueError: a source is empty or too long, or has tokens that are not in the vocabulary.
    """
    check_sources(model.config, sources)
    check_integer("batch_size", batch_size, 1)
    limit = model.config.max_length
    rows = [np.asarray(source, np.int32) for source in sources]
    translations: list[list[int]] = [[] for _ in rows]
    for batch in batches_by_length(rows, batch_size):
        source, lengths = pad_right([rows[index] for index in batch], batch_size, limit)
        # Lengths are read on the host before the tokens are predicted: T is the shape of the second
        # program. The encoder runs in both.
        targets = np.asarray(_predict_target_lengths(params, source, lengths, model=model))
        targets = targets if limit is None else np.minimum(targets, limit)
        length = bucket_length(int(targets.max()), PROMPT_LENGTH_MULTIPLE, limit)
        predicted = np.asarray(
            _predict_tokens(params, source, lengths, targets, model=model, length=length)
        )
        for row, index in enumerate(batch):
            tokens = predicted[row, : targets[row]]
            ends = np.flatnonzero(np.isin(tokens, stop))
            translations[index] = tokens[: ends[0] if len(ends) else None].tolist()
    return translations


@functools.partial(jax.jit, static_argnames="model")
def _predict_target_lengths(
    params: Params,
    source: Int[Array, "B S"],
    lengths: Int[Array, "B"],
    *,
    model: NonAutoregressive,
) -> Int[Array, "B"]:
    segments = segments_of_lengths(lengths, source.shape[1])
    output = model.apply({"params": params}, source, None, source_segments=segments)
    assert output.logits is not None
    predicted: jax.Array = replicate(model.constrain, predict_lengths(output.logits, lengths))
    return predicted


@functools.partial(jax.jit, static_argnames=("model", "length"))
def _predict_tokens(
    params: Params,
    source: Int[Array, "B S"],
    lengths: Int[Array, "B"],
    targets: Int[Array, "B"],
    *,
    model: NonAutoregressive,
    length: int,
) -> Int[Array, "B T"]:
    output = model.apply(
        {"params": params},
        source,
        jnp.zeros((len(source), length), jnp.int32),
        source_segments=segments_of_lengths(lengths, source.shape[1]),
        segments=segments_of_lengths(targets, length),
    )
    assert output.logits is not None
    tokens: jax.Array = replicate(model.constrain, jnp.argmax(output.logits, axis=-1))
    return tokens
