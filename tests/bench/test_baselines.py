"""Baselines against examples computed by hand, and as distributions that sum to 1."""

import numpy as np
import pytest

from bench.claims.baselines import KneserNey, MostFrequentTag, WordByWord


def test_most_frequent_tag_and_tag_of_unknown_words() -> None:
    words = [("run", "VERB"), ("run", "VERB"), ("run", "NOUN"), ("Ann", "PROPN"), ("Bo", "PROPN")]
    model = MostFrequentTag([*words, ("the", "DET"), ("the", "DET"), ("the", "DET")])
    assert [model.predict(word) for word in ("run", "the", "Ann", "Zoe")] == [
        "VERB",
        "DET",
        "PROPN",
        "PROPN",
    ]


def test_kneser_ney_by_hand() -> None:
    """The stream 0 1 0 2 0 1 0 1, V = 3, order 2.

    Bigrams: 01 three times, 10 twice, 02 once, 20 once: D_2 = 2 / (2 + 2 * 1) = 1/2.
    Distinct tokens before: 0 has two (1 and 2), 1 and 2 have one each: D_1 = 2 / (2 + 2 * 1) = 1/2.
    """
    model = KneserNey(np.array([0, 1, 0, 2, 0, 1, 0, 1]), 3, 2)
    assert model.discounts == [0.5, 0.5]
    below = [(2 - 0.5) / 4 + 0.5 * 3 / 4 / 3, *[(1 - 0.5) / 4 + 0.5 * 3 / 4 / 3] * 2]
    assert sum(below) == pytest.approx(1)
    after_0 = [0.5 * 2 * below[0] / 4, (3 - 0.5 + 0.5 * 2 * below[1]) / 4]
    after_1 = [(2 - 0.5 + 0.5 * 1 * below[0]) / 2, 0.5 * 1 * below[1] / 2]
    tokens = np.array([0, 0, 1, 1, 0])
    expected = [after_0[0], after_0[1], after_1[1], after_1[0]]
    np.testing.assert_allclose(model.probabilities(tokens), expected)
    assert model.loss(tokens) == pytest.approx(-np.mean(np.log(expected)))


def test_word_translation_by_ibm_model_1() -> None:
    """The example of Koehn's book: `das Haus`, `das Buch`, `ein Buch`."""
    pairs = [("das haus", "the house"), ("das buch", "the book"), ("ein buch", "a book")]
    model = WordByWord([(source.split(), target.split()) for source, target in pairs])
    actual = model.translate(["das", "buch", "ein", "haus", "hier"])
    assert actual == ["the", "book", "a", "house", "hier"]  # an unknown word is copied
