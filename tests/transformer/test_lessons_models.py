"""Known facts about whole models, as small experiments."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.norm_placement import gradient_norms
from bench.rank_collapse import STACKS, shares
from tests.transformer.formulas import Array, assert_close, random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Initialization,
    LanguageModel,
    LearnedPositions,
    TransformerConfig,
)
from transformer.chunked_cross_entropy import ChunkedCrossEntropy
from transformer.layers.embedding import get_output_matrix

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


@pytest.mark.full
def test_one_causal_pass_equals_a_loop_over_prefixes() -> None:
    """Looped over prefixes, collapsed to [B T, V], or in chunks: the same loss as one pass."""
    vocab, batch, length = 11, 2, 5
    block = BlockConfig(mixer=AttentionConfig(num_heads=2), feed_forward=FeedForwardConfig(7))
    config = TransformerConfig(
        vocab_size=vocab,
        d_model=6,
        num_layers=1,
        layer_pattern=(block,),
        position_embedding=LearnedPositions(length),
        pad_vocab_to_multiple=16,
    )
    model = LanguageModel(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *model.example_inputs())["params"]
    params, run = random_params_like(shapes), jax.jit(model.apply)
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    looped = 0.0
    for t in range(length):
        visible = np.broadcast_to(np.arange(length) <= t, inputs.shape).astype(int)
        logits = run({"params": params}, inputs * visible, segments=visible).logits[:, t]
        probs = np.asarray(jax.nn.softmax(logits))
        looped -= np.log(probs[np.arange(batch), targets[:, t]]).sum()

    out = run({"params": params}, inputs)
    flat = np.asarray(jax.nn.log_softmax(out.logits.reshape(batch * length, -1)))
    collapsed = -flat[np.arange(batch * length), targets.reshape(-1)].sum()
    assert_close(collapsed, looped)
    weights = jnp.ones(targets.shape)
    for chunks in (1, 2, length):
        form = ChunkedCrossEntropy(vocab, chunks)
        loss = form(out.hidden, get_output_matrix(params, config), jnp.asarray(targets), weights)
        assert_close(loss, looped)


@pytest.mark.full
def test_pre_norm_gradients_are_level_over_depth_and_post_norm_are_not() -> None:
    """The norm of each layer's gradient at initialization, twelve layers deep."""
    post, pre = (gradient_norms(placement, 12)["decoder"] for placement in ("post", "pre"))
    assert post[-1] > 25 * post[0]
    assert pre.max() < 4 * pre.min()


@pytest.mark.parametrize("name", ["attention alone", "attention and feed-forward"])
def test_rank_collapse_without_residuals(name: str) -> None:
    """The part that differs between tokens shrinks faster with each layer."""
    differing = np.median(shares(STACKS[name], 5), axis=1)
    assert differing[0] > 0.9
    assert differing[2] < differing[1] ** 2 < 0.7
    assert differing[3] < differing[2] ** 2
    assert differing[5] < 1e-6


def test_no_rank_collapse_with_residuals() -> None:
    assert np.median(shares(STACKS["attention and residuals"], 5), axis=1).min() > 0.5
    assert np.median(shares(STACKS["whole layers, pre-norm"], 12), axis=1).min() > 0.4
