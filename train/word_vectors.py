"""Word vectors from a text file, with which a run's embeddings begin.

The format of word2vec, GloVe and fastText: on each line a word and its numbers, separated by
spaces. word2vec and fastText put a line with the numbers of words and of columns before them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from train.data.files import TextFile, expand_path
from train.data.text_files import open_decompressed
from train.data.tokenizer import Tokenizer
from train.errors import UserError


class WordVectors(NamedTuple):
    """The contents of a file."""

    rows: Mapping[str, int]
    """Row of each word."""
    table: np.ndarray
    """[words, D] float32."""


def is_word_vector_file(path: str) -> bool:
    """Return True if a source of weights is a file: runs are folders."""
    place = expand_path(path)
    return place.exists() and not place.is_dir()


def read_word_vectors(path: str) -> WordVectors:
    """Read word vectors, decompressed if the name ends in .gz or .zst.

    Of a word on two lines, the first vector counts.

    Raises:
      UserError: A line is not a word and its numbers.
    """
    place = expand_path(path)
    rows: dict[str, int] = {}
    vectors: list[np.ndarray] = []
    width = 0
    with open_decompressed(TextFile(place.name, place)) as stream:
        for number, line in enumerate(stream, 1):
            fields = line.split()
            if number == 1 and len(fields) == 2 and all(each.isdigit() for each in fields):
                width = int(fields[1])
                continue
            if not fields:
                continue
            width = width or len(fields) - 1
            # A few words of GloVe have spaces: the numbers are counted from the end.
            name, numbers = b" ".join(fields[:-width]), fields[-width:]
            vector = _parse_numbers(numbers)
            if not (width and name and vector is not None):
                raise UserError(
                    f"{place} line {number}: is not a word and {width or 'its'} numbers; give word "
                    "vectors as text (those of a word2vec .bin have to be written as text first)"
                )
            word = name.decode("utf-8", "replace")
            if word not in rows:
                rows[word] = len(vectors)
                vectors.append(vector)
    if not vectors:
        raise UserError(f"{place}: has no word vectors; each line has to be a word and its numbers")
    return WordVectors(rows, np.stack(vectors))


def _parse_numbers(fields: Sequence[bytes]) -> np.ndarray | None:
    """Return the numbers, or None if they are not all finite numbers."""
    try:
        numbers = np.array([float(each) for each in fields], np.float32)
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None


def check_width(source: str, vectors: Any, embedding: Any) -> None:
    """Raise UserError unless vectors are as wide as the embeddings of the model."""
    if vectors.shape[1] != embedding.shape[1]:
        raise UserError(
            f"{source}: has {vectors.shape[1]} numbers for each word, and this model's embeddings "
            f"have {embedding.shape[1]}; give --model.d-model {vectors.shape[1]}, or other vectors"
        )


def rows_of_words(
    words: Mapping[str, int],  # word -> row of the file
    source: str,
    tokenizer: Tokenizer | None,
) -> list[tuple[int, int]]:
    """Return (token id, row of the file) of the tokens that are words of the file.

    A token that is not among them in its own case is looked for in lower case.

    Raises:
      UserError: There is none.
    """
    vocabulary = {} if tokenizer is None else tokenizer.vocabulary
    found = (
        (token_id, words.get(token, words.get(token.lower(), -1)))
        for token, token_id in vocabulary.items()
    )
    shared = [(token_id, row) for token_id, row in found if row >= 0]
    if not shared:
        raise UserError(
            f"{source}: none of its {len(words):,} words is a token of this run; word vectors need "
            "tokens that are words: --data.tokenizer.kind word"
        )
    return shared


def rescale(
    vectors: np.ndarray,  # [words, D]
    rows: Sequence[tuple[int, int]],
    table: np.ndarray,  # [V, D] initial embeddings
) -> np.ndarray:  # [words, D]
    """Return the vectors with the standard deviation of the model's initial embeddings.

    Files differ in scale by tens, and a model's first layer is initialized for its own.
    """
    taken = vectors[[row for _, row in rows]]
    return vectors * (float(np.std(table)) / max(float(np.std(taken)), 1e-12))
