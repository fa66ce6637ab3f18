"""Word vectors from the words around each word: skip-gram with negative samples.

Mikolov et al. 2013 (Distributed Representations of Words and Phrases), section 2. What it learns is
a table like that of a model's embeddings, which `with_vectors` puts there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.config import Initializer
from transformer.layers.params import declare_weight


class SkipGram(nn.Module):
    """Two vectors for each word: one as the middle of a window, one as what stands around it."""

    vocab_size: int  # rows: V, with padding where a model's table has it
    width: int  # D

    @nn.compact
    def __call__(
        self,
        centres: jax.Array,  # [B] words in the middle
        contexts: jax.Array,  # [B] a word near each
        negatives: jax.Array,  # [B, M] words drawn at random
    ) -> jax.Array:  # [B]
        """-log s(u_context . v) - sum over negatives of log s(-u_negative . v) (equation 4)."""
        spread = nn.initializers.uniform(1 / self.width)
        centred: Initializer = lambda *given: spread(*given) - 0.5 / self.width  # noqa: E731
        v = self.embedding_table("embedding", centred)[centres]
        around = self.embedding_table("contexts", nn.initializers.zeros)
        near = jnp.einsum("BD,BD->B", v, around[contexts])
        far = jnp.einsum("BD,BMD->BM", v, around[negatives])
        return -jax.nn.log_sigmoid(near) - jnp.sum(jax.nn.log_sigmoid(-far), axis=1)

    def embedding_table(self, name: str, init: Initializer) -> jax.Array:  # [V, D]
        rows, columns = {"vocab": self.vocab_size}, {"embed": self.width}
        return declare_weight(self, name, inputs=rows, outputs=columns, init=init, dtype="float32")


def noise_distribution(
    counts: np.ndarray,  # [V] how often each word occurs
    power: float = 0.75,
) -> np.ndarray:  # [V] probabilities
    """What negatives are drawn from: the counts to a power, which favours rare words.

    `jax.random.choice` draws by the sums of these; `categorical` takes a random number for every
    word of the vocabulary.
    """
    raised = np.asarray(counts, np.float64) ** power
    return np.asarray(raised / raised.sum(), np.float32)


def subsample_frequent_words(
    tokens: np.ndarray,  # [n]
    counts: np.ndarray,  # [V]
    seed: int,
    threshold: float = 1e-3,
) -> np.ndarray:  # [at most n]
    """The text without most of its frequent words: each is kept with sqrt(threshold / its share).

    Section 2.3; words rarer than the threshold stay.
    """
    share = counts / counts.sum()
    keep = np.sqrt(threshold / np.maximum(share, threshold))
    return tokens[np.random.default_rng(seed).random(len(tokens)) < keep[tokens]]


def skip_gram_pairs(
    tokens: np.ndarray,  # [n] a text
    window: int,
    seed: int,
) -> np.ndarray:  # [pairs, 2] centres and contexts
    """Every word with those near it; how near is drawn for each, from 1 to `window`.

    So nearer words weigh more (Mikolov et al. 2013, Efficient Estimation, section 3.2).
    """
    reach = np.random.default_rng(seed).integers(1, window + 1, len(tokens))
    found = []
    for distance in range(1, min(window, len(tokens) - 1) + 1):
        before, after = tokens[:-distance], tokens[distance:]
        found.append(np.stack([before, after], axis=1)[reach[:-distance] >= distance])
        found.append(np.stack([after, before], axis=1)[reach[distance:] >= distance])
    return np.concatenate(found) if found else np.zeros((0, 2), tokens.dtype)


def replace_embeddings(
    params: dict[str, Any],  # of a model
    vectors: jax.Array,  # [V, D] or with fewer rows than the model's
) -> dict[str, Any]:
    """The parameters with word vectors in place of the embeddings; rows beyond stay.

    Raises ValueError for a table that does not fit.
    """
    embedding = params["embedding"]
    if vectors.shape[1] != embedding.shape[1] or len(vectors) > len(embedding):
        raise ValueError(
            f"word vectors {vectors.shape[0]} x {vectors.shape[1]}: the model's table is "
            f"{embedding.shape[0]} x {embedding.shape[1]}; learn them for its words and width"
        )
    rows = jnp.asarray(vectors, embedding.dtype)
    return {**params, "embedding": jnp.concatenate([rows, embedding[len(rows) :]])}
