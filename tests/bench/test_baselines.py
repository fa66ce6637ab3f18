"""Baselines against examples computed by hand, and as distributions that sum to 1."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import baselines
from bench.baselines import KneserNey, MostFrequentTag, NaiveBayes, WordByWord
from train.config.experiment_files import find_experiment
from train.data.example_configs import ClassificationDataConfig, TokenLabelDataConfig
from train.errors import UserError


def test_naive_bayes_matches_textbook_example() -> None:
    """Manning, Raghavan and Schütze, example 13.1: P(c | d5) is proportional to 3/4 (3/7)^3 1/14
    1/14 = 0.0003.
    """
    texts = [
        ["Chinese", "Beijing", "Chinese"],
        ["Chinese", "Chinese", "Shanghai"],
        ["Chinese", "Macao"],
        ["Tokyo", "Japan", "Chinese"],
    ]
    model = NaiveBayes(texts, np.array([1, 1, 1, 0]))
    document = ["Chinese", "Chinese", "Chinese", "Tokyo", "Japan"]
    china = 3 / 4 * (3 / 7) ** 3 * 1 / 14 * 1 / 14
    other = 1 / 4 * (2 / 9) ** 3 * 2 / 9 * 2 / 9
    np.testing.assert_allclose(np.exp(model.scores(document)), [other, china], rtol=1e-12)
    assert model.predict([document, ["Japan", "Seoul"]]).tolist() == [1, 0]


def test_word_and_bigram_features() -> None:
    assert baselines.unigrams("A  b a") == ["a", "b", "a"]
    assert baselines.unigrams_and_bigrams("A b c") == ["a", "b", "c", ("a", "b"), ("b", "c")]


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


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_kneser_ney_sums_to_one_after_any_context(order: int) -> None:
    random = np.random.default_rng(order)
    vocab_size = 6
    # The last two tokens are never in training; runs make contexts of every length known.
    model = KneserNey(random.integers(0, vocab_size - 2, 300) // 2 * 2, vocab_size, order)
    for _ in range(20):
        context = random.integers(0, vocab_size, 6)
        after = [model.probabilities(np.append(context, w))[-1] for w in range(vocab_size)]
        assert min(after) > 0
        assert sum(after) == pytest.approx(1)


def test_longer_context_lowers_the_loss() -> None:
    stream = np.array(
        [0, 0, 1, 1] * 50
    )  # two tokens determine the next one, a single token does not
    losses = [KneserNey(stream, 2, order).loss(stream) for order in (1, 2, 3)]
    assert losses[0] == pytest.approx(math.log(2), abs=0.01)
    assert losses[1] == pytest.approx(math.log(2), abs=0.02)
    assert losses[2] < 0.1


def test_word_translation_by_ibm_model_1() -> None:
    """The example of Koehn's book: `das Haus`, `das Buch`, `ein Buch`."""
    pairs = [("das haus", "the house"), ("das buch", "the book"), ("ein buch", "a book")]
    model = WordByWord([(source.split(), target.split()) for source, target in pairs])
    actual = model.translate(["das", "buch", "ein", "haus", "hier"])
    assert actual == ["the", "book", "a", "house", "hier"]  # an unknown word is copied


def test_scores_of_files(tmp_path: Path) -> None:
    text = "".join(
        f"{'good' if n % 2 else 'bad'}\ta {'fine' if n % 2 else 'dull'} film\n" for n in range(20)
    )
    for split in ("train", "valid", "test"):
        (tmp_path / split).write_text("label\ttext\n" + text)
    paths: dict[str, Any] = dict(
        path=str(tmp_path / "train"),
        validation_path=str(tmp_path / "valid"),
        test_path=str(tmp_path / "test"),
    )
    labelled = dataclasses.replace(find_experiment("sst2"), data=ClassificationDataConfig(**paths))
    scores = baselines.classification(labelled)
    assert scores["most frequent class"] == "test accuracy 50.0%"
    assert scores["naive Bayes, words"] == "test accuracy 100.0%"
    for split in ("train", "valid", "test"):
        (tmp_path / split).write_text("the DET\ncat NOUN\n\nthe NOUN\nthe DET\n")
    tagged = TokenLabelDataConfig(**paths)
    assert list(
        baselines.tagging(dataclasses.replace(find_experiment("ud_ewt"), data=tagged)).values()
    ) == ["test accuracy 75.0%"]


def test_config_without_baselines_raises() -> None:
    with pytest.raises(UserError, match="task gpt2: has no baselines; give some of trec, sst2"):
        baselines.main(("gpt2",))
