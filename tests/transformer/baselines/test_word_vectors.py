"""Skip-gram with negative samples: its formula and its data."""

import jax
import numpy as np
import pytest

from tests.transformer.formulas import array, assert_close, normal, random_params_like
from transformer.baselines.model_configs import bag_of_embeddings_config
from transformer.baselines.word_vectors import (
    SkipGram,
    noise_distribution,
    replace_embeddings,
    skip_gram_pairs,
    subsample_frequent_words,
)
from transformer.layers.logical_axes import abstract_weights
from transformer.models.heads import Classifier

V, D, M = 11, 5, 3


def test_loss_matches_formula() -> None:
    params = {"embedding": normal(1, V, D), "contexts": normal(2, V, D)}
    centres, contexts, negatives = array([3, 7]), array([4, 3]), array([[1, 2, 2], [0, 7, 9]])
    run = jax.jit(SkipGram(V, D).apply)
    losses = run({"params": params}, centres, contexts, negatives)
    expected = []
    for centre, context, others in zip(centres, contexts, negatives, strict=True):
        v, u = params["embedding"][centre], params["contexts"]
        chance = 1 / (1 + np.exp(-u[context] @ v))
        negative_words = 1 / (1 + np.exp(u[others] @ v))
        expected.append(-np.log(chance) - np.log(negative_words).sum())
    assert_close(losses, expected)


def test_initial_vectors() -> None:
    words = array([[0] * M])
    given = jax.random.key(0), words[0, :1], words[0, :1], words
    _, axes = abstract_weights(SkipGram(V, D).init, *given)
    assert axes["embedding"].names == axes["contexts"].names == ("vocab", "embed")
    drawn = jax.jit(SkipGram(V, D).init)(*given)["params"]
    table, contexts = (np.asarray(drawn[name]) for name in ("embedding", "contexts"))
    assert np.abs(table).max() <= 0.5 / D
    assert table.min() < 0 < table.max()
    assert not contexts.any()


def test_negatives_follow_counts_to_the_power_0_75() -> None:
    assert_close(noise_distribution(array([1, 16, 81, 0])), array([1, 8, 27, 0]) / 36)


def test_pairs_within_a_random_window() -> None:
    tokens = array([5, 3, 8, 3, 1, 9, 2])
    reach = np.random.default_rng(1).integers(1, 4, len(tokens))
    expected = [
        (tokens[i], tokens[j])
        for i in range(len(tokens))
        for j in range(len(tokens))
        if 0 < abs(i - j) <= reach[i]
    ]
    actual = skip_gram_pairs(tokens, 3, seed=1)
    assert sorted(map(tuple, actual.tolist())) == sorted((int(a), int(b)) for a, b in expected)
    assert len(set(reach.tolist())) == 3
    assert skip_gram_pairs(tokens[:1], 3, seed=4).shape == (0, 2)


def test_frequent_words_are_subsampled() -> None:
    tokens = np.repeat([0, 1], [40_000, 10])
    left = subsample_frequent_words(tokens, np.bincount(tokens), seed=0, threshold=1e-2)
    assert (left == 1).sum() == 10
    assert (left == 0).sum() == pytest.approx(4_000, rel=0.1)


def test_vectors_replace_embeddings() -> None:
    model = Classifier(bag_of_embeddings_config(D, 7, vocab_size=V, pad_vocab_to_multiple=16))
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    table = normal(3, V, D)
    actual = replace_embeddings(params, table)
    assert np.array_equal(actual["embedding"][:V], table)
    assert np.array_equal(actual["embedding"][V:], params["embedding"][V:])
    assert actual["layers"] is params["layers"]
    with pytest.raises(ValueError, match="word vectors 11 x 4: the model's table is 16 x 5"):
        replace_embeddings(params, table[:, :4])
