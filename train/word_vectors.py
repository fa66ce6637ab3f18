"""Word vectors from a text file, with which a run's embeddings begin.

The format of word2vec (Mikolov et al. 2013), GloVe (Pennington et al. 2014) and fastText
(Bojanowski et al. 2017): on each line a word and its numbers, separated by spaces. word2vec and
fastText put a line with the numbers of words and of columns before them.
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
    """Return True if a source of weights is a file: any file is taken for one, runs are folders."""
    place = expand_path(path)
    return place.exists() and not place.is_dir()


def read_word_vectors(path: str) -> WordVectors:
    """Read word vectors, decompressed if the name ends in .gz or .zst.

    Of a word on two lines, the first vector counts.

    Raises:
      UserError: The file cannot be read, has no vectors, or fewer than its first line says; or a
        line is not a word and finite numbers.
    """
    place = expand_path(path)
    rows: dict[str, int] = {}
    vectors: list[np.ndarray] = []
    width, announced, read = 0, 0, 0
    with open_decompressed(TextFile(place.name, place)) as stream:
        for number, line in enumerate(stream, 1):
            fields = line.removeprefix(b"\xef\xbb\xbf").split()  # a byte order mark
            if not fields:
                continue
            if not width and len(fields) == 2 and all(each.isdigit() for each in fields):
                announced, width = map(int, fields)
                continue
            width = width or len(fields) - 1
            # A few words of GloVe have spaces: the numbers are counted from the end.
            name, vector = b" ".join(fields[:-width]), _parse_numbers(fields[-width:])
            if not (width and name and vector is not None):
                raise UserError(
                    f"{place} line {number}: is not a word and {width or 'its'} numbers; give word "
                    "vectors as text (a .zip has to be unpacked, and a word2vec .bin written as "
                    "text first)"
                )
            read += 1
            word = name.decode("utf-8", "replace")
            if word not in rows:
                rows[word] = len(vectors)
                vectors.append(vector)
    if read < announced:
        raise UserError(
            f"{place}: has {read:,} words, and its first line says {announced:,}; fetch it again"
        )
    if not vectors:
        raise UserError(
            f"{place}: has no word vectors; each line has to be a word, then its numbers"
        )
    return WordVectors(rows, np.stack(vectors))


def _parse_numbers(fields: Sequence[bytes]) -> np.ndarray | None:
    """Return the numbers, or None if they are not all finite numbers."""
    try:
        with np.errstate(over="ignore"):
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

    A token is looked for in its own case, then in lower case, then in any case.

    Raises:
      UserError: Tokens are not words, or none is a word of the file.
    """
    if tokenizer is None or not tokenizer.has_word_tokens:
        raise UserError(
            f"{source}: word vectors need tokens that are words; give --data.tokenizer.kind word"
        )
    in_any_case: dict[str, int] = {}
    for word, row in words.items():
        in_any_case.setdefault(word.lower(), row)
    shared = []
    for token, token_id in tokenizer.vocabulary.items():
        lower = token.lower()
        row = words.get(token, words.get(lower, in_any_case.get(lower, -1)))
        if row >= 0:
            shared.append((token_id, row))
    if not shared:
        raise UserError(
            f"{source}: none of its {len(words):,} words is among the "
            f"{len(tokenizer.vocabulary):,} of this run; give vectors of the language of its text"
        )
    return shared


def copy_scaled(
    table: np.ndarray,  # [V, D] initial embeddings
    vectors: np.ndarray,  # [words, D]
    rows: Sequence[tuple[int, int]],  # (token id, row of the file)
    source: str,
) -> np.ndarray:  # [V, D]
    """Return the table with vectors, scaled to the standard deviation of the initial embeddings.

    That of vectors differs between files by factors of ten or more, and the layers above are
    initialized for that of the embeddings.

    Raises:
      UserError: The vectors do not differ.
    """
    tokens, chosen = np.array(rows).T
    taken = vectors[chosen]
    spread = float(np.std(taken))
    if not spread:
        raise UserError(f"{source}: all numbers of this run's words are equal; give other vectors")
    # In float32: NumPy sums low precision in itself, and stops growing.
    scale = float(np.std(np.asarray(table, np.float32))) / spread
    result = table.copy()
    result[tokens] = (taken * scale).astype(table.dtype)
    return result
