"""Token streams: the tokens of a split in a memory-mapped file, and windows cut out of them.

A stream is never read whole, and processes share its memory.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from train.data.text_files import Document
from train.data.tokenizer import Tokenizer
from train.telemetry.stages import stage


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents of a split, concatenated.

    A document is stored as the separator token, then its own tokens, so that each of these is a
    target with a token before it. The stream ends with one more separator, so that the end of the
    last document is a target too.
    """

    name: str
    """Name of the split, for error messages."""

    tokens: np.ndarray  # [n] uint16 or uint32
    """Token ids. The first and the last are separators."""

    document_starts: np.ndarray  # [documents] int64
    """Position of each document's separator in tokens, ascending. The first is 0."""

    num_bytes: int
    """Size of the text in UTF-8, before any normalization. Bits per byte are relative to it."""

    digest: str = ""
    """Digest of the texts."""

    @property
    def num_targets(self) -> int:
        """Number of prediction targets: all tokens but the first."""
        return len(self.tokens) - 1


def write_stream(
    folder: pathlib.Path,
    name: str,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    num_characters: float = 0.0,
) -> dict[str, Any]:
    """Tokenize documents into ``folder``, and return the JSON metadata that `read_stream` needs.

    Args:
      folder: Folder of the files.
      name: Name of the split.
      documents: Documents of the split.
      tokenizer: Tokenizer to use.
      num_characters: About how many characters the documents have, for progress. 0: unknown.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    tally = _Tally()
    with (
        _tokens_file(folder, name).open("wb") as file,
        stage(f"tokenizing {name}", num_characters) as progress,
    ):
        writer = _Writer(file, dtype, tokenizer.eos_token_id)
        for tokens in tokenizer.encode_documents(tally.count(documents), progress.advance):
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
    """Map a stream that `write_stream` wrote into memory."""
    return TokenStream(
        name=name,
        tokens=np.memmap(_tokens_file(folder, name), metadata["dtype"], mode="r"),
        document_starts=np.memmap(_starts_file(folder, name), np.int64, mode="r"),
        num_bytes=metadata["bytes"],
        digest=metadata["digest"],
    )


def stream_is_complete(folder: pathlib.Path, name: str, metadata: dict[str, Any]) -> bool:
    """Return True if the files have the sizes that they were written with."""
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
    """Appends documents with one separator between them, even if a text ends in it."""

    def __init__(self, file: IO[bytes], dtype: np.dtype, separator: int):
        self._file, self._dtype, self._separator = file, dtype, separator
        self._last = -1
        self.length = 0
        self.starts: list[int] = []

    def add(self, tokens: np.ndarray) -> None:
        if len(tokens) == 0:  # a text of white space, with the word tokenizer
            return
        self.starts.append(self.separate())
        self._write(tokens)

    def separate(self) -> int:
        """Append a separator unless the last token is one, and return its position."""
        if self._last != self._separator:
            self._write(np.array([self._separator]))
        return self.length - 1

    def _write(self, tokens: np.ndarray) -> None:
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._last = int(tokens[-1])
        self.length += len(tokens)


class _Tally:
    """Counts the bytes of texts, and digests them, as they pass through."""

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
"""Arrays of a batch on the host, by name. They include `examples` and the `weights` of targets."""


class Windows:
    """Windows of a stream, cut many at a time.

    The stream is a circle whose last separator is its first. A window may begin anywhere, and none
    is cut short at the end.

    Attributes:
      window_length: Tokens of a window, T.
      num_targets: Number of prediction targets of the stream: the circumference of the circle.
    """

    def __init__(self, stream: TokenStream, window_length: int, *, document_masking: bool):
        self.window_length = window_length
        self.num_targets = stream.num_targets
        # A view of the memmap as a plain array: indexing np.memmap itself is slower.
        self._tokens = np.asarray(stream.tokens)
        self._document_masking = document_masking
        starts = np.asarray(stream.document_starts)
        # Windows may wrap around: repeat the documents that a window can reach beyond the end.
        self._starts = np.concatenate([starts, starts[starts < window_length] + self.num_targets])

    def cut(
        self,
        starts: np.ndarray,  # [B] int64, positions in the stream
    ) -> HostBatch:
        """Return the windows that begin at these positions, T tokens each.

        Returns:
          tokens: [B, T] int32.
          targets: [B, T] int32, the next token of each.
          segments: [B, T] int32, index of the document within the window, from 1. The first
            document may begin before the window. All 1 without document masking.
          positions: [B, T] int32, position within the document, or within the window if the
            document began before it. Position within the window without document masking.
        """
        # One token more than a window: the target of its last token.
        offsets = starts[:, None] + np.arange(self.window_length + 1)  # [B, T + 1]
        tokens = self._tokens[offsets % self.num_targets].astype(np.int32)
        segments, positions = self._segments_and_positions(offsets[:, :-1])
        return {
            "tokens": np.ascontiguousarray(tokens[:, :-1]),
            "targets": np.ascontiguousarray(tokens[:, 1:]),
            "segments": segments,
            "positions": positions,
        }

    def _segments_and_positions(
        self,
        offsets: np.ndarray,  # [B, T]
    ) -> tuple[np.ndarray, np.ndarray]:
        first = offsets[:, :1]
        if not self._document_masking:
            positions = (offsets - first).astype(np.int32)
            return np.ones_like(positions), positions
        document = np.searchsorted(self._starts, offsets, side="right")  # [B, T], from 1
        segments = document - document[:, :1] + 1
        positions = offsets - np.maximum(self._starts[document - 1], first)
        return segments.astype(np.int32), positions.astype(np.int32)
