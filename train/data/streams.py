"""The tokens of a split on disk, mapped into memory: never read whole, shared by processes.

Windows cut out of a token stream, many at a time, with no loop over rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from train.data.text import Document
from train.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """The documents of a split, one after the other.

    A document is stored as the token that stands between documents, then its own tokens: each of
    these is a target that has a token before it. The stream ends with one more separator, so that
    the end of the last document is learned too.
    """

    name: str
    """The split, as messages call it."""

    tokens: np.ndarray  # [n] uint16 or uint32
    """Token numbers; the first and the last are separators."""

    document_starts: np.ndarray  # [documents] int64
    """Where in tokens each document's separator is, in order; the first is 0."""

    num_bytes: int
    """The size of the text in UTF-8, before any normalisation: what bits per byte divide by."""

    digest: str = ""
    """Tells the texts of streams apart."""

    @property
    def num_targets(self) -> int:
        """How many tokens there are to predict: all but the first."""
        return len(self.tokens) - 1


def write_stream(
    folder: pathlib.Path, name: str, documents: Iterable[Document], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Encodes documents into ``folder`` and returns what `read_stream` needs to know, as JSON."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    tally = _Tally()
    with _tokens_file(folder, name).open("wb") as file:
        writer = _Writer(file, dtype, tokenizer.eos_token_id)
        for tokens in tokenizer.encode_documents(tally.count(documents)):
            writer.add(tokens)
        writer.separate()
    starts = np.array(writer.starts, np.int64)
    _starts_file(folder, name).write_bytes(starts.tobytes())
    return {
        "documents": len(starts),
        "tokens": writer.length,
        "bytes": tally.bytes,
        "digest": tally.digest.hexdigest(),
        "dtype": dtype.name,
    }


def read_stream(folder: pathlib.Path, name: str, metadata: dict[str, Any]) -> TokenStream:
    """Maps what `write_stream` wrote into memory."""
    return TokenStream(
        name=name,
        tokens=np.memmap(_tokens_file(folder, name), metadata["dtype"], mode="r"),
        document_starts=np.memmap(_starts_file(folder, name), np.int64, mode="r"),
        num_bytes=metadata["bytes"],
        digest=metadata["digest"],
    )


def stream_is_complete(folder: pathlib.Path, name: str, metadata: dict[str, Any]) -> bool:
    """Whether the files have the size that they were written with."""
    sizes = (
        (_tokens_file(folder, name), metadata["tokens"] * np.dtype(metadata["dtype"]).itemsize),
        (_starts_file(folder, name), metadata["documents"] * np.dtype(np.int64).itemsize),
    )
    return all(file.is_file() and file.stat().st_size == size for file, size in sizes)


def _tokens_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / f"{name}.tokens"


def _starts_file(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / f"{name}.starts"


class _Writer:
    """Appends documents, with one separator between them even if a text ended in it itself."""

    def __init__(self, file: IO[bytes], dtype: np.dtype, separator: int):
        self._file, self._dtype, self._separator = file, dtype, separator
        self._last = -1
        self.length = 0
        self.starts: list[int] = []

    def add(self, tokens: np.ndarray) -> None:
        if len(tokens) == 0:  # white space alone has no words
            return
        self.starts.append(self.separate())
        self._write(tokens)

    def separate(self) -> int:
        """Sees that a separator is the last token, and returns its place."""
        if self._last != self._separator:
            self._write(np.array([self._separator]))
        return self.length - 1

    def _write(self, tokens: np.ndarray) -> None:
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._last = int(tokens[-1])
        self.length += len(tokens)


class _Tally:
    """Counts texts, and takes their digest, while they pass through."""

    def __init__(self) -> None:
        self.bytes = 0
        self.digest = hashlib.blake2b(digest_size=16)

    def count(self, documents: Iterable[Document]) -> Iterator[str]:
        for name, text in documents:
            encoded = text.encode()
            self.bytes += len(encoded)
            self.digest.update(f"{name}\0{len(encoded)}\0".encode(errors="surrogateescape"))
            self.digest.update(encoded)
            yield text


HostBatch = dict[str, np.ndarray]


class Windows:
    """The windows of a stream, which is a circle: its last separator is its first.

    So a window may begin anywhere, and none is cut short at the end.

    Attributes:
      length: Tokens in a window, T.
      targets: Tokens to predict in the stream, which is how far around the circle is.
    """

    def __init__(self, stream: TokenStream, window_length: int, *, document_masking: bool):
        self.window_length = window_length
        self.num_targets = stream.num_targets
        self._tokens = np.asarray(stream.tokens)  # indexing the memmap itself is slower
        self._segments = document_masking
        starts = np.asarray(stream.document_starts)
        # Those that a window can reach beyond the end stand there once more.
        self._starts = np.concatenate([starts, starts[starts < window_length] + self.num_targets])

    def cut(
        self,
        starts: np.ndarray,  # [B] int64, places in the stream
    ) -> HostBatch:
        """The windows that begin at these places, T tokens each.

        Returns:
          tokens: [B, T] int32.
          targets: [B, T] int32, the token after each of them.
          segments: [B, T] int32, the number of the document within the window, from 1 on; a
            window's first document may have begun before it. All 1 without segments.
          positions: [B, T] int32, places within the document, or from the window's beginning if
            the document began before it. Places within the window without segments.
        """
        places = starts[:, None] + np.arange(self.window_length + 1)  # [B, T + 1]
        tokens = self._tokens[places % self.num_targets].astype(np.int32)
        segments, positions = self._number(places[:, :-1])
        return {
            "tokens": np.ascontiguousarray(tokens[:, :-1]),
            "targets": np.ascontiguousarray(tokens[:, 1:]),
            "segments": segments,
            "positions": positions,
        }

    def _number(
        self,
        places: np.ndarray,  # [B, T]
    ) -> tuple[np.ndarray, np.ndarray]:
        first = places[:, :1]
        if not self._segments:
            positions = (places - first).astype(np.int32)
            return np.ones_like(positions), positions
        document = np.searchsorted(self._starts, places, side="right")  # [B, T], from 1 on
        segments = document - document[:, :1] + 1
        positions = places - np.maximum(self._starts[document - 1], first)
        return segments.astype(np.int32), positions.astype(np.int32)
