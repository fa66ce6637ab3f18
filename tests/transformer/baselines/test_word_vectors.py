"""Skip-gram with negative samples against its formula, and what it learns."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.transformer.formulas import array, assert_close, normal
from transformer.baselines.baseline_configs import bag_of_embeddings_config
from transformer.baselines.word_vectors import (
    SkipGram,
    noise_distribution,
    replace_embeddings,
    skip_gram_pairs,
    subsample_frequent_words,
)
from transformer.models.heads import Classifier

V, D, M = 11, 5, 3


def test_the_loss_of_a_word_its_neighbour_and_strangers() -> None:
    params = {"embedding": normal(1, V, D), "contexts": normal(2, V, D)}
    centres, contexts, negatives = array([3, 7]), array([4, 3]), array([[1, 2, 2], [0, 7, 9]])
    losses = SkipGram(V, D).apply({"params": params}, centres, contexts, negatives)
    expected = []
    for centre, context, others in zip(centres, contexts, negatives, strict=True):
        v, u = params["embedding"][centre], params["contexts"]
        chance = 1 / (1 + np.exp(-u[context] @ v))
        strangers = 1 / (1 + np.exp(u[others] @ v))
        expected.append(-np.log(chance) - np.log(strangers).sum())
    assert_close(losses, expected)


def test_it_starts_small_and_undecided() -> None:
    words = array([[0] * M])
    boxed = jax.jit(SkipGram(V, D).init)(jax.random.key(0), words[0, :1], words[0, :1], words)
    table, contexts = (boxed["params"][name] for name in ("embedding", "contexts"))
    assert table.axes.names == contexts.axes.names == ("vocab", "embed")
    assert np.abs(table.value).max() <= 0.5 / D
    assert np.asarray(table.value).min() < 0 < np.asarray(table.value).max()
    assert not contexts.value.any()


def test_negatives_are_drawn_from_counts_to_the_power_of_three_quarters() -> None:
    assert_close(noise_distribution(array([1, 16, 81, 0])), array([1, 8, 27, 0]) / 36)


def test_pairs_are_those_within_the_reach_of_each_centre() -> None:
    tokens = array([5, 3, 8, 3, 1, 9, 2])
    reach = np.random.default_rng(1).integers(1, 4, len(tokens))
    expected = [
        (tokens[i], tokens[j])
        for i in range(len(tokens))
        for j in range(len(tokens))
        if 0 < abs(i - j) <= reach[i]
    ]
    found = skip_gram_pairs(tokens, 3, seed=1)
    assert sorted(map(tuple, found.tolist())) == sorted((int(a), int(b)) for a, b in expected)
    assert len(set(reach.tolist())) == 3
    assert skip_gram_pairs(tokens[:1], 3, seed=4).shape == (0, 2)


def test_frequent_words_are_thinned_out() -> None:
    tokens = np.repeat([0, 1], [40_000, 10])
    left = subsample_frequent_words(tokens, np.bincount(tokens), seed=0, threshold=1e-2)
    assert (left == 1).sum() == 10
    assert (left == 0).sum() == pytest.approx(4_000, rel=0.1)


def test_words_that_stand_for_each_other_come_near_each_other() -> None:
    """Each sentence is three words of one kind: 0 to 4, or 5 to 9."""
    random = np.random.default_rng(0)
    pairs = np.concatenate(
        [skip_gram_pairs(random.permutation(5)[:3] + 5 * (n % 2), 2, n) for n in range(300)]
    )
    counts = np.bincount(pairs[:, 0], minlength=10)
    chances = jnp.asarray(noise_distribution(counts))
    model, adam = SkipGram(10, D), optax.adam(0.05)
    params = {"embedding": 0.1 * normal(0, 10, D), "contexts": 0.1 * normal(1, 10, D)}

    def loss(params: Any, key: jax.Array) -> jax.Array:
        negatives = jax.random.choice(key, len(counts), (len(pairs), M), p=chances)
        losses: Any = model.apply({"params": params}, pairs[:, 0], pairs[:, 1], negatives)
        return jnp.mean(losses)

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        updates, state = adam.update(jax.grad(loss)(params, key), state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(0), 60)
    learn = jax.jit(lambda params: jax.lax.scan(step, (params, adam.init(params)), keys)[0][0])
    table = np.asarray(learn(params)["embedding"])
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    likeness = (unit @ unit.T).reshape(2, 5, 2, 5)
    assert likeness[[0, 1], :, [0, 1]].min() > likeness[[0, 1], :, [1, 0]].max()


def test_vectors_take_the_place_of_a_models_embeddings() -> None:
    model = Classifier(bag_of_embeddings_config(D, 7, vocab_size=V, pad_vocab_to_multiple=16))
    params = jax.jit(model.init_params)(jax.random.key(0))
    table = normal(3, V, D)
    found = replace_embeddings(params, table)
    assert np.array_equal(found["embedding"][:V], table)
    assert np.array_equal(found["embedding"][V:], params["embedding"][V:])
    assert found["layers"] is params["layers"]
    with pytest.raises(
        ValueError, match=r"^word vectors 11 x 4: the model's table is 16 x 5; learn"
    ):
        replace_embeddings(params, table[:, :4])
