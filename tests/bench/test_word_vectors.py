"""Word vectors are learned from texts, and initialize a classifier."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bench import word_vectors
from bench.word_vectors import accuracy, read
from configs.trec import EXPERIMENTS as TREC
from tests.train.support import light_compiler as light_compiler
from train.data.data_config import TokenizerConfig
from train.data.example_configs import ClassificationDataConfig
from train.experiment import Experiment
from train.skip_gram import train_word_vectors
from train.word_vectors import read_word_vectors, write_word_vectors
from transformer.baselines.baseline_configs import bag_of_embeddings_config


def questions(folder: Path) -> Experiment:
    """Return a bag of embeddings for a few texts of two classes."""
    lines = [f"{'animal' if n % 2 else 'tool'}\tthe {'cat' if n % 2 else 'axe'}" for n in range(40)]
    for name in ("train", "test"):
        (folder / name).write_text("label\ttext\n" + "\n".join(lines) + "\n")
    data = ClassificationDataConfig(
        path=str(folder / "train"),
        test_path=str(folder / "test"),
        max_length=8,
        tokenizer=TokenizerConfig("word"),
    )
    model = bag_of_embeddings_config(4, 5)
    return dataclasses.replace(TREC["bag"], data=data, model=model, steps=2, batch_size=8)


@pytest.mark.nightly
def test_words_in_the_same_contexts_get_similar_vectors() -> None:
    random = np.random.default_rng(0)
    texts = [random.integers(0, 2, 500) + 2 * (n % 2) for n in range(40)]
    vectors = train_word_vectors(texts, 4, 8, steps=500)
    unit_vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = unit_vectors @ unit_vectors.T
    assert min(similarity[0, 1], similarity[2, 3]) > similarity[:2, 2:].max()


@pytest.mark.full
def test_classifier_starts_from_the_vectors(tmp_path: Path) -> None:
    experiment = questions(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the cat met a dog\n\nthe axe\n")
    known = read(experiment, text)
    assert [len(each) for each in known[:2]] == [2, 2]  # a, met and dog are not in the vocabulary
    assert len(known) > 20
    vectors = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    assert 0 <= accuracy(experiment, vectors) <= 1
    assert word_vectors.lstm(experiment.model).layer_pattern[0].mixer.kind == "lstm"


def test_written_vectors_are_read_again(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    write_word_vectors(tmp_path / "v.txt", {"cat": 2, "<unk>": 0, "Axt": 1}, vectors)
    rows, table = read_word_vectors(str(tmp_path / "v.txt"))
    assert dict(rows) == {"<unk>": 0, "Axt": 1, "cat": 2}
    np.testing.assert_allclose(table, vectors, rtol=1e-5)
