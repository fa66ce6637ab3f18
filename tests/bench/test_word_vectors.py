"""Word vectors are learned from texts, and read again."""

from pathlib import Path

import numpy as np
import pytest

from tests.train.support import light_compiler as light_compiler
from train.errors import UserError
from train.warm_start.skip_gram import train_word_vectors
from train.warm_start.word_vectors import read_word_vectors, write_word_vectors


def test_words_in_the_same_contexts_get_similar_vectors() -> None:
    random = np.random.default_rng(0)
    texts = [random.integers(0, 2, 500) + 2 * (n % 2) for n in range(40)]
    vectors = train_word_vectors(texts, 4, 8, steps=250)
    unit_vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = unit_vectors @ unit_vectors.T
    assert min(similarity[0, 1], similarity[2, 3]) > similarity[:2, 2:].max() + 0.3
    with pytest.raises(UserError, match="no two words"):
        train_word_vectors([np.array([1])], 4, 8, steps=1)


def test_written_vectors_are_read_again(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    write_word_vectors(tmp_path / "v.txt", {"cat": 2, "<unk>": 0, "Axt": 1}, vectors)
    rows, table = read_word_vectors(str(tmp_path / "v.txt"))
    assert dict(rows) == {"<unk>": 0, "Axt": 1, "cat": 2}
    np.testing.assert_allclose(table, vectors, rtol=1e-5)
