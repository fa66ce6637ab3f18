"""Text embeddings: one vector for each sequence of tokens, pooled from the last hidden states.

The vector of a sequence is the mean of its tokens' states, that of its first token ([CLS]), that of
its last one, or the maximum of each feature (Reimers and Gurevych 2019, section 3, and the models
of sentence-transformers).
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float32, Int

from transformer.attention.masks import Segments
from transformer.generation.batches import (
    Tokens,
    batches_of_tokens,
    check_fits,
    pad_right,
    segments_of_lengths,
)
from transformer.model_context import replicate
from transformer.models.feature_classifier import FeatureClassifier
from transformer.models.heads import masked_max, masked_mean
from transformer.models.model import Model, ModelOutput
from transformer.models.stack import supports_segments
from transformer.taps import NO_OUTPUTS
from transformer.validation import check_choice, check_token_sequence

EmbeddingPooling = Literal["mean", "first", "last", "max"]
"""Vector of a sequence: the mean of its tokens, its first or last one, or the maximum of all."""

MIN_NORM = 1e-12
"""Norm below which a vector is not scaled to 1."""


class Body(Model):
    """The embeddings and layers of a model with any head, whose parameters it reads.

    Linen ignores the parameters of the head.
    """

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segments: Segments | None = None,
    ) -> ModelOutput:
        """Return the hidden states [B, T, D] after the final norm; `Model` has the arguments."""
        output = self.apply_backbone(
            tokens,
            positions=positions,
            segments=segments,
            single_document=True,
            outputs=NO_OUTPUTS,
        )
        return ModelOutput(None, output.x)


def embed_sequences(
    model: Model,
    params: Any,
    sequences: Sequence[Tokens],  # N of them, of any lengths
    *,
    pooling: EmbeddingPooling = "mean",
    normalize: bool = True,
) -> Float32[np.ndarray, "N D"]:
    """Return the vector of each sequence. Sequences are sorted by length and padded in batches.

    Args:
      model: A model of tokens with one stack of layers, with any head.
      params: Its parameters.
      sequences: Token sequences, with the tokens that the model expects around a text.
      pooling: Which hidden states make the vector.
      normalize: Scale the vectors to length 1.

    Raises:
      ValueError: The model has an encoder and a decoder or reads no tokens, it is causal and the
        first token should be the vector, or a sequence is empty, too long or not of its vocabulary.
    """
    config = model.config
    if config.encoder is not None or isinstance(model, FeatureClassifier):
        raise ValueError(
            f"model {type(model).__name__}: has no one stack of layers over tokens; give a "
            "language model or an encoder"
        )
    check_choice("pooling", pooling, get_args(EmbeddingPooling))
    if config.causal and pooling == "first":
        raise ValueError(
            "pooling first: the first token of a causal model sees no other; give last or mean"
        )
    for number, sequence in enumerate(sequences):
        name = f"sequence {number}"
        check_token_sequence(name, sequence, config.vocab_size)
        check_fits(name, sequence, config)
    rows = [np.asarray(sequence, np.int32) for sequence in sequences]
    vectors = np.zeros((len(rows), config.d_model), np.float32)
    body = Body(config, model.hardware, model.constrain)
    lengths = [len(row) for row in rows]
    limit, has_segments = config.max_length, supports_segments(config.layer_pattern)
    sees_padding = not has_segments and not config.causal
    batches = batches_of_tokens(lengths, limit)
    if sees_padding:
        batches = (([index], 1) for index in range(len(rows)))
    for batch, num_rows in batches:
        if sees_padding:
            limit = lengths[batch[0]]
        tokens, without_padding = pad_right([rows[index] for index in batch], num_rows, limit)
        found = _embed(
            params,
            tokens,
            without_padding,
            body=body,
            pooling=pooling,
            normalize=normalize,
            has_segments=has_segments,
        )
        vectors[batch] = np.asarray(found)[: len(batch)]
    return vectors


@functools.partial(jax.jit, static_argnames=("body", "pooling", "normalize", "has_segments"))
def _embed(
    params: Any,
    tokens: Int[Array, "B T"],  # padded on the right
    lengths: Int[Array, "B"],  # without the padding
    *,
    body: Body,
    pooling: EmbeddingPooling,
    normalize: bool,
    has_segments: bool,
) -> Float32[Array, "B D"]:
    length = tokens.shape[1]
    index = jnp.arange(length)[None, :]
    segments = segments_of_lengths(lengths, length)
    hidden = body.apply(
        {"params": params},
        tokens,
        # The number of tokens decides the angles of some rotary embeddings.
        positions=jnp.where(index < lengths[:, None], index, -1),
        segments=segments if has_segments else None,
    ).hidden.astype(jnp.float32)
    match pooling:
        case "mean":
            vectors = masked_mean(hidden, segments)[:, 0]
        case "max":
            vectors = masked_max(hidden, segments)[:, 0]
        case "first":
            vectors = hidden[:, 0]
        case _:  # last
            last = (lengths - 1)[:, None, None]
            vectors = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    if normalize:
        norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
        vectors = vectors / jnp.maximum(norms, MIN_NORM)
    result: jax.Array = replicate(body.constrain, vectors)
    return result
