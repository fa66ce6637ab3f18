"""Token streams: the tokens of a split in a memory-mapped file, and windows cut out of them.

A stream is never read whole, and processes share its memory.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from train.data.text_files import Document
from train.data.tokenizer import Tokenizer
from train.runtime.stages import stage


@dataclasses.dataclass(frozen=True)
class DocumentFrame:
    """Special tokens around the documents of a stream: `<eos> text <eos> text <eos>`.

    Where a published tokenizer puts tokens before every text (Llama's <s>, BERT's [CLS]), its model
    has read `<s> text </s>`, and a stream is `</s> <s> text </s> <s> text </s>`.
    """

    separator: int
    """Token that ends a document."""
    first: tuple[int, ...] = ()
    """Tokens before a text besides the separator. They are no targets: a model that has read texts
    one by one does not know that one follows another."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Return the frame that a tokenizer's models expect."""
        first = tokenizer.added_token_ids[0].tolist()
        return cls(
            tokenizer.eos_token_id, () if first == [tokenizer.eos_token_id] else tuple(first)
        )

    def pieces(
        self,
        parts: Iterable[np.ndarray],  # each [t] integers
    ) -> Iterator[np.ndarray]:  # each [n]
        """Yield a document with its separator before it, or else between `first` and separator.

        A frame that the tokens bring along is not repeated. Nothing if there are no tokens.
        """
        waiting = (part for part in parts if len(part))
        if (part := next(waiting, None)) is None:
            return
        first, separator = (np.array(each, part.dtype) for each in (self.first, [self.separator]))
        yield first if len(first) else separator
        if len(first) and np.array_equal(part[: len(first)], first):
            part = part[len(first) :]
        for following in waiting:
            yield part
            part = following
        yield part[:-1] if part[-1:] == separator else part
        if len(first):
            yield separator

    def piece(
        self,
        tokens: np.ndarray,  # [t] integers
    ) -> np.ndarray:  # [n]
        """Return what `pieces` yields of a document, in one array."""
        return np.concatenate([tokens[:0], *self.pieces([tokens])])

    def around_pieces(self) -> tuple[list[int], list[int]]:
        """Return the tokens before the first piece and after the last: separators at both ends."""
        separator = [self.separator]
        return (separator, []) if self.first else ([], separator)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents of a split in their frames, concatenated.

    Each token of a document is a target with a token before it, and so is the end of each. The
    first and the last token are separators.
    """

    name: str
    """Name of the split, for error messages."""

    tokens: np.ndarray  # [n] uint16 or uint32
    """Token ids. The first and the last are separators."""

    document_starts: np.ndarray  # [documents] int64
    """Position of each document's first token, its frame's, ascending."""

    num_bytes: int
    """Size of the text in UTF-8, before any normalization. Bits per byte are relative to it."""

    digest: str = ""
    """Digest of the texts."""

    first: tuple[int, ...] = ()
    """Tokens that are no targets, as in `DocumentFrame`."""

    @property
    def num_targets(self) -> int:
        """Number of tokens but the first: each is a target, except for those in `first`."""
        return len(self.tokens) - 1

    @property
    def num_scored_targets(self) -> int:
        """Number of targets that count in the loss."""
        return self.num_targets - len(self.document_starts) * len(self.first)


def write_stream(
    folder: pathlib.Path,
    name: str,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    num_characters: float = 0.0,
) -> dict[str, Any]:
    """Tokenize documents into ``folder``, and return the JSON metadata that `read_stream` needs."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    tally, frame = _Tally(), DocumentFrame.of(tokenizer)
    with (
        _tokens_file(folder, name).open("wb") as file,
        stage(f"tokenizing {name}", num_characters) as progress,
    ):
        length = 0

        def write(tokens: Sequence[int] | np.ndarray) -> None:
            nonlocal length
            file.write(np.asarray(tokens, dtype).tobytes())
            length += len(tokens)

        before, after = frame.around_pieces()
        write(before)
        document_starts = []
        for parts in tokenizer.encode_pieces(tally.count(documents), progress.advance):
            start = length
            for tokens in frame.pieces(parts):
                write(tokens)
            if length > start:  # not of white space, with the word tokenizer
                document_starts.append(start)
        write(after)
    starts = np.array(document_starts, np.int64)
    _starts_file(folder, name).write_bytes(starts.tobytes())
    return {
        "documents": len(starts),
        "tokens": length,
        "bytes": tally.bytes,
        "digest": tally.digest.hexdigest(),
        "dtype": dtype.name,
        "first": frame.first,
    }


def read_stream(folder: pathlib.Path, name: str, metadata: dict[str, Any]) -> TokenStream:
    """Map a stream that `write_stream` wrote into memory."""
    return TokenStream(
        name=name,
        tokens=np.memmap(_tokens_file(folder, name), metadata["dtype"], mode="r"),
        document_starts=np.memmap(_starts_file(folder, name), np.int64, mode="r"),
        num_bytes=metadata["bytes"],
        digest=metadata["digest"],
        first=tuple(metadata["first"]),
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


class _Tally:
    """Counts the bytes of texts, and digests them, as they pass through."""

    def __init__(self) -> None:
        self.bytes = 0
        self.digest = hashlib.blake2b(digest_size=16)

    def count(self, documents: Iterable[Document]) -> Iterator[Iterator[str]]:
        for document in documents:
            # Not the name, which may change with the file's. Lengths keep documents apart.
            self.digest.update(f"{document.num_bytes}\0".encode())
            yield self._pieces(document)

    def _pieces(self, document: Document) -> Iterator[str]:
        for piece in document.pieces():
            encoded = piece.encode()
            self.bytes += len(encoded)
            self.digest.update(encoded)
            yield piece


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
        # Windows may wrap around: repeat the documents that a window can reach beyond the end. The
        # separator before the first document belongs to the last.
        end = starts[-1:] - self.num_targets if len(starts) and starts[0] else starts[:0]
        wrapped = starts[starts < window_length] + self.num_targets
        self._starts = np.concatenate([end, starts, wrapped])
        self._not_targets = np.array(stream.first, np.int32)

    def cut(
        self,
        starts: np.ndarray,  # [B] int64, positions in the stream
    ) -> HostBatch:
        """Return the windows that begin at these positions, T tokens each.

        Returns:
          tokens: [B, T] int32.
          targets: [B, T] int32, the next token of each.
          weights: [B, T] float32, 1 for each target that counts: 0 for the frame of a document.
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
            "weights": self._weights(tokens[:, 1:]),
            "segments": segments,
            "positions": positions,
        }

    def _weights(
        self,
        targets: np.ndarray,  # [B, T]
    ) -> np.ndarray:  # [B, T] float32
        if not len(self._not_targets):
            return np.ones(targets.shape, np.float32)
        return (~np.isin(targets, self._not_targets)).astype(np.float32)

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
