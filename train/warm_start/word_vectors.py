"""Files of word vectors, with which a run's embeddings begin.

The text format of word2vec (Mikolov et al. 2013), GloVe (Pennington et al. 2014) and fastText
(Bojanowski et al. 2017): on each line a word and its numbers, separated by spaces. word2vec and
fastText put a line with the numbers of words and of columns before them. word2vec's binary format
(`.bin`) has that line too; then come, for each word, the word, a space, its numbers as float32 of
little-endian byte order, and in most files a line feed.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from train.data.files import TextFile
from train.data.rows import open_decompressed, plain_name
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.files import expand_path


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
    """Read word vectors, which may be compressed.

    A file named .bin is word2vec's binary format, any other is text. Of two equal words the vector
    of the first counts.

    Raises:
      UserError: The file cannot be read, has no vectors, or fewer than its first line says; or an
        entry is not a word and finite numbers.
    """
    place = expand_path(path)
    rows: dict[str, int] = {}
    vectors: list[np.ndarray] = []
    file = TextFile(place.name, place)
    read = _read_binary if plain_name(file).endswith(".bin") else _read_text
    with open_decompressed(file) as stream:
        for word, vector in read(stream, str(place)):
            if not np.isfinite(vector).all():
                raise UserError(
                    f"{place}: the vector of {word!r} has a number that is not finite in float32; "
                    "leave the word out, or fetch the file again"
                )
            if word not in rows:
                rows[word] = len(vectors)
                vectors.append(vector)
    if not vectors:
        raise UserError(f"{place}: has no word vectors; give a file with words and their numbers")
    return WordVectors(rows, np.stack(vectors))


def _read_text(stream: IO[bytes], place: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the words and vectors of a text file."""
    width, announced, read = 0, 0, 0
    for number, line in enumerate(stream, 1):
        fields = line.removeprefix(b"\xef\xbb\xbf").split()  # a byte order mark
        if not fields:
            continue
        if not width and len(fields) == 2 and all(each.isdigit() for each in fields):
            announced, width = map(int, fields)
            continue
        width = width or len(fields) - 1
        try:
            # A few words of GloVe have spaces: the numbers are counted from the end.
            word, numbers = b" ".join(fields[:-width]), list(map(float, fields[-width:]))
        except ValueError:
            word, numbers = b"", []
        if not (width > 0 and word):
            raise UserError(
                f"{place} line {number}: is not a word and {max(width, 1)} numbers; give word "
                "vectors as text, or a word2vec file named .bin (a .zip has to be unpacked)"
            )
        read += 1
        with np.errstate(over="ignore"):  # to infinity, which is refused
            vector = np.array(numbers, np.float32)
        yield word.decode("utf-8", "replace"), vector
    _check_count(place, read, announced)


def _read_binary(stream: IO[bytes], place: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the words and vectors of a file in word2vec's binary format."""
    header = stream.readline(100).split()
    if len(header) != 2 or not all(each.isdigit() for each in header):
        raise UserError(
            f"{place}: does not begin with the numbers of words and of columns, so it is not "
            "word2vec's binary format; give the vectors as text (fastText: the .vec file)"
        )
    announced, width = map(int, header)
    for read in range(announced):
        word = bytearray()
        while (byte := stream.read(1)) not in (b" ", b""):
            word += byte
        encoded = stream.read(4 * width)
        if len(encoded) < 4 * width:
            _check_count(place, read, announced)
        # The line feed after the numbers of the word before, if there is one.
        name = word.removeprefix(b"\n").decode("utf-8", "replace")
        yield name, np.frombuffer(encoded, "<f4").astype(np.float32)
    if stream.read(2).removeprefix(b"\n"):  # of a text file, every byte is read as a number too
        raise UserError(
            f"{place}: has more than the {announced:,} words of its first line, so it is damaged "
            "or not word2vec's binary format; if it is text, name it .txt"
        )


def _check_count(place: str, read: int, announced: int) -> None:
    if read < announced:
        raise UserError(
            f"{place}: has {read:,} words, and its first line says {announced:,}; fetch it again"
        )


def write_word_vectors(
    path: Path,
    vocabulary: Mapping[str, int],  # word -> row
    vectors: np.ndarray,  # [rows, D]
) -> None:
    """Write vectors as text in the format of word2vec."""
    lines = [f"{len(vocabulary)} {vectors.shape[1]}"]
    for word, row in sorted(vocabulary.items(), key=lambda each: each[1]):
        lines.append(" ".join([word, *(f"{each:.6g}" for each in vectors[row])]))
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


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
      UserError: The vectors are nearly equal.
    """
    tokens, chosen = np.array(rows).T
    taken = vectors[chosen].astype(np.float64)
    # The rounding of a mean is enough to make equal numbers differ a little.
    centre = taken.mean(axis=0) if len(taken) > 1 else taken.mean()
    if np.std(taken - centre) <= 1e-3 * np.sqrt(np.mean(taken**2)):
        raise UserError(f"{source}: the vectors of this run's words are equal; give other vectors")
    # In float32: NumPy sums low precision in itself, and stops growing.
    scale = np.std(np.asarray(table, np.float32)) / np.std(taken)
    result = table.copy()
    result[tokens] = (taken * scale).astype(table.dtype)
    return result
