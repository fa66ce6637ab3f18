"""Training of word vectors: skip-gram with negative sampling (Mikolov et al. 2013)."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.errors import UserError
from train.runtime.stages import stage
from transformer.baselines.word_vectors import (
    SkipGram,
    noise_distribution,
    skip_gram_pairs,
    subsample_frequent_words,
)

WINDOW, NEGATIVES, PAIRS = 5, 5, 4096
"""Words to each side, negative samples of a pair, and pairs of a step."""


def train_word_vectors(
    texts: Sequence[np.ndarray],  # each has [n] words
    num_words: int,  # rows of the table
    width: int,  # D
    *,
    steps: int,
    seed: int = 0,
) -> np.ndarray:  # [num_words, D] float32
    """Train word vectors on texts. The pairs of all words are in memory: some 50 bytes a word.

    Raises:
      UserError: No text has two words.
    """
    every = np.concatenate(texts) if texts else np.zeros(0, np.int32)
    counts = np.bincount(every, minlength=num_words)
    parts = [
        skip_gram_pairs(
            subsample_frequent_words(text, counts, seed + number), WINDOW, seed + number
        )
        for number, text in enumerate(texts)
    ]
    if not any(map(len, parts)):
        raise UserError("the texts: have no two words beside each other; give longer ones")
    pairs = np.concatenate(parts)
    order = np.random.default_rng(seed)
    model, adam = SkipGram(num_words, width), optax.adam(optax.linear_schedule(3e-3, 0.0, steps))
    noise_probs = jnp.asarray(noise_distribution(counts))

    def loss(params: Any, batch: jax.Array, key: jax.Array) -> jax.Array:
        negatives = jax.random.choice(key, num_words, (len(batch), NEGATIVES), p=noise_probs)
        losses: Any = model.apply({"params": params}, batch[:, 0], batch[:, 1], negatives)
        return jnp.mean(losses)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: jax.Array, key: jax.Array) -> tuple[Any, Any]:
        updates, state = adam.update(jax.grad(loss)(params, batch, key), state)
        return optax.apply_updates(params, updates), state

    one = jnp.zeros(1, jnp.int32)
    params = jax.jit(model.init)(jax.random.key(seed), one, one, one[None])["params"]
    state = adam.init(params)
    with stage("training word vectors", total=steps) as progress:
        for number in range(steps):
            batch = pairs[order.integers(0, len(pairs), PAIRS)]
            key = jax.random.fold_in(jax.random.key(seed), number)
            params, state = step(params, state, batch, key)
            progress.advance(1)
    return np.asarray(params["embedding"])
