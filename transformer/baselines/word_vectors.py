"""Word vectors: skip-gram with negative sampling.

Mikolov et al. 2013 (Distributed Representations of Words and Phrases), section 2. The learned table
has the shape of a model's embeddings; `replace_embeddings` puts it there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from transformer.layers.basic import declare_weight
from transformer.model_context import Initializer
from transformer.validation import check_shapes


class SkipGram(nn.Module):
    """Skip-gram model: one table for center words, one for context words."""

    vocab_size: int  # rows: V, with padding where a model's table has it
    width: int  # D

    @nn.compact
    def __call__(
        self,
        centers: Int[Array, "B"],  # words in the middle
        contexts: Int[Array, "B"],  # a neighbor of each
        negatives: Int[Array, "B M"],  # words drawn at random
    ) -> Float[Array, "B"]:
        """Return -log s(u_context . v) - sum_negatives log s(-u_negative . v) (equation 4)."""
        check_shapes(
            centers=(centers, "B", int),
            contexts=(contexts, "B", int),
            negatives=(negatives, "B M", int),
        )
        uniform = nn.initializers.uniform(1 / self.width)

        def centered_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return uniform(key, shape, dtype) - 0.5 / self.width

        v = self.embedding_table("embedding", centered_uniform)[centers]
        u = self.embedding_table("contexts", nn.initializers.zeros)
        positive_scores = jnp.einsum("BD,BD->B", v, u[contexts])
        negative_scores = jnp.einsum("BD,BMD->BM", v, u[negatives])
        negative_loss = jnp.sum(jax.nn.log_sigmoid(-negative_scores), axis=1)
        return -jax.nn.log_sigmoid(positive_scores) - negative_loss

    def embedding_table(self, name: str, init: Initializer) -> Float[Array, "V D"]:
        rows, columns = {"vocab": self.vocab_size}, {"embed": self.width}
        return declare_weight(self, name, inputs=rows, outputs=columns, init=init, dtype="float32")


def noise_distribution(
    counts: Int[np.ndarray, "V"],  # how often each word occurs
    power: float = 0.75,
) -> Float[np.ndarray, "V"]:  # probabilities
    """Return the distribution of negatives: counts to a power, which favors rare words.

    Draw from it with `jax.random.choice`, based on cumulative sums. `jax.random.categorical` would
    need one random number per word of the vocabulary.
    """
    powered = np.asarray(counts, np.float64) ** power
    return np.asarray(powered / powered.sum(), np.float32)


def subsample_frequent_words(
    tokens: Int[np.ndarray, "n"],
    counts: Int[np.ndarray, "V"],
    seed: int,
    threshold: float = 1e-3,
) -> Int[np.ndarray, "kept"]:
    """Drop frequent words at random; keep each with probability sqrt(threshold / frequency).

    Section 2.3. Words rarer than the threshold are always kept.
    """
    frequency = counts / counts.sum()
    keep = np.sqrt(threshold / np.maximum(frequency, threshold))
    return tokens[np.random.default_rng(seed).random(len(tokens)) < keep[tokens]]


def skip_gram_pairs(
    tokens: Int[np.ndarray, "n"],  # a text
    window: int,
    seed: int,
) -> Int[np.ndarray, "pairs 2"]:  # centers and contexts
    """Return (center, context) pairs; each word draws its window size from 1 to `window`.

    Closer words are drawn more often (Mikolov et al. 2013, Efficient Estimation, section 3.2).
    """
    reach = np.random.default_rng(seed).integers(1, window + 1, len(tokens))
    pairs = []
    for distance in range(1, min(window, len(tokens) - 1) + 1):
        before, after = tokens[:-distance], tokens[distance:]
        pairs.append(np.stack([before, after], axis=1)[reach[:-distance] >= distance])
        pairs.append(np.stack([after, before], axis=1)[reach[distance:] >= distance])
    return np.concatenate(pairs) if pairs else np.zeros((0, 2), tokens.dtype)


def replace_embeddings(
    params: dict[str, Any],  # of a model
    vectors: jax.Array,  # [V, D] or with fewer rows than the model's
) -> dict[str, Any]:
    """Return the parameters with word vectors as embeddings; rows beyond the table are unchanged.

    Raises:
      ValueError: the table has another width or more rows than the model's.
    """
    embedding = params["embedding"]
    if vectors.shape[1] != embedding.shape[1] or len(vectors) > len(embedding):
        raise ValueError(
            f"word vectors {vectors.shape[0]} x {vectors.shape[1]}: the model's table is "
            f"{embedding.shape[0]} x {embedding.shape[1]}; train them for its vocabulary and "
            "width"
        )
    rows = jnp.asarray(vectors, embedding.dtype)
    return {**params, "embedding": jnp.concatenate([rows, embedding[len(rows) :]])}
