"""Known facts about whole models, as small experiments."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

from tests.transformer.formulas import Array
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Initialization,
    LanguageModel,
    LearnedPositions,
    TransformerConfig,
)

V, T, D = 13, 16, 32
STEPS, ROWS = 250, 32
TRANSITIONS = (1, 3)
"""A language of V words on a ring: each is 1 or 3 further on than the word before the last."""


def text(seed: int, rows: int) -> Array:  # [B, T + 1]
    random = np.random.RandomState(seed)
    words = [random.randint(0, V, rows), random.randint(0, V, rows)]
    while len(words) <= T:
        words.append((words[-2] + random.choice(TRANSITIONS, rows)) % V)
    return np.stack(words, axis=1)


ENTROPY = (math.log(V) + (T - 1) * math.log(len(TRANSITIONS))) / T
"""Mean entropy of a token of `text` given those before it: the least loss of a causal model."""


class Trained(NamedTuple):
    run: Any
    params: Any
    loss: float  # at the end of training

    def next_token_logits(self, prompts: Array) -> Array:  # [B, t] -> [B, V]
        """Return logits of the next token, which the model has not seen."""
        length = prompts.shape[1]
        padded = np.pad(prompts, [(0, 0), (0, T - length)])
        segments = np.broadcast_to(np.arange(T) < length, padded.shape).astype(int)
        logits = self.run({"params": self.params}, padded, segments=segments).logits
        return np.asarray(logits)[:, length - 1]


@functools.cache
def train_model(causal: bool) -> Trained:
    """Train a one-layer model for a few hundred steps, each on new text."""
    block = BlockConfig(mixer=AttentionConfig(num_heads=2), feed_forward=FeedForwardConfig(2 * D))
    config = TransformerConfig(
        vocab_size=V,
        d_model=D,
        num_layers=1,
        layer_pattern=(block,),
        position_embedding=LearnedPositions(T),
        causal=causal,
        initialization=Initialization(std=0, embedding_std=0.3),
        pad_vocab_to_multiple=1,
    )
    model, optimizer = LanguageModel(config), optax.adam(0.01)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch[:, :-1]).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def step(carry: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def train(key: jax.Array, batches: jax.Array) -> tuple[Any, jax.Array]:
        params = model.init_params(key)
        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), batches)
        return params, losses

    batches = np.stack([text(seed, ROWS) for seed in range(STEPS)])
    params, losses = train(jax.random.key(0), batches)
    return Trained(jax.jit(model.apply), params, float(losses[-10:].mean()))


@pytest.mark.full
def test_loss_without_causal_mask_is_below_the_entropy() -> None:
    """An unmasked model copies each token from its input; only the last target is not in it."""
    assert ENTROPY - 0.02 < train_model(causal=True).loss < ENTROPY + 0.1
    assert train_model(causal=False).loss < 0.15 * ENTROPY


@pytest.mark.full
def test_model_without_causal_mask_generates_nonsense() -> None:
    """Half a row is given and the rest generated greedily; count how many transitions are in the
    language.

    By chance, 2 of 13 are.
    """
    right = {}
    for causal in (True, False):
        model, words = train_model(causal), text(STEPS, 64)[:, : T // 2]
        while words.shape[1] < T:
            words = np.append(words, model.next_token_logits(words).argmax(-1)[:, None], axis=1)
        jumps = (words[:, 2:] - words[:, :-2]) % V
        right[causal] = np.isin(jumps[:, T // 2 - 2 :], TRANSITIONS).mean()
    assert right[True] > 0.97
    assert right[False] < 0.35
