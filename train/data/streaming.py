"""Training text that is read while the run trains: never whole, in memory or on disk.

Documents are read in windows, shuffled within each, tokenized, and concatenated. A position in this
order is six integers, from which it continues exactly: of the documents before it, only those of
the same window are read again.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.data.batches import TrainingBatches, example_ids, host_rows, seeded_permutation
from train.data.data_config import SourceConfig, StreamingConfig
from train.data.files import Notes, TextFile, find_splits
from train.data.held_data import PYTHON_DATA_PREFIX
from train.data.rows import START, RecordPosition
from train.data.source_mixing import MixtureSchedule, mix_rows
from train.data.text_files import LIBRARY_PATH, Document, DocumentReader
from train.data.token_file import DocumentFrame, HostBatch, TokenStream, Windows
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError

MAX_WINDOW_CHARACTERS = 2**26
"""Characters of a shuffle window, however few documents have them."""

KEPT_POSITIONS = 256
"""Positions of past batches that are kept. Loading is a few batches ahead of training, and a
rollback returns to a checkpoint, which has a position of its own."""


@dataclasses.dataclass(frozen=True)
class StreamedText:
    """Documents of the files of one source. Each pass reads the files again."""

    section: str
    """Settings of the source, for error messages: `data.sources.0`."""
    name: str
    files: tuple[TextFile, ...]
    text_field: str
    held_out: int
    """Lines or rows at the start of the first file that training leaves out."""

    @classmethod
    def find(
        cls, section: str, name: str, source: SourceConfig, streaming: StreamingConfig
    ) -> StreamedText:
        """Return the text of a source. Raises UserError if it has no files to stream."""
        setting = f"{section}.path"
        if source.path == LIBRARY_PATH or source.path.startswith(PYTHON_DATA_PREFIX):
            raise UsageError(
                f"{setting} {source.path}: is not a file, and only files are streamed; set "
                "data.streaming.enabled to False"
            )
        if source.max_bytes:
            raise UsageError(
                f"{section}.max_bytes {source.max_bytes}: is not supported, as a stream is read "
                "to its end; leave it out"
            )
        splits = find_splits(source.path, setting, Notes())
        files = splits["train"]
        if len(files) < streaming.readers:
            raise UsageError(
                f"data.streaming.readers {streaming.readers}: {setting} {source.path} has only "
                f"{len(files)} files to divide among them; give at most {len(files)}"
            )
        has_validation = source.validation_path or "validation" in splits
        held_out = 0 if has_validation else streaming.validation_documents
        return cls(section, name, files, source.text_field, held_out)

    def documents(
        self, *, held_out: bool = False, notes: Notes | None = None
    ) -> Iterator[Document]:
        """Yield the documents in the order of the files, those to train on or those held out."""
        for index in range(1 if held_out else len(self.files)):
            for position, document in self.records(index, START, notes):
                if held_out and position.record > self.held_out:
                    return
                if held_out == self.is_held_out(index, position):
                    yield document

    def records(
        self, index: int, start: RecordPosition, notes: Notes | None = None
    ) -> Iterator[tuple[RecordPosition, Document]]:
        """Yield the documents of a file that have text, each with the position after it."""
        setting = f"{self.section}.text_field"
        reader = DocumentReader(self.files, self.text_field, setting, notes)
        all_records = reader.records(self.files[index], start)
        return ((position, document) for position, document in all_records if not document.is_empty)

    def is_held_out(self, index: int, position: RecordPosition) -> bool:
        """Return True for a document, given the position after it, that is not trained on."""
        return index == 0 and position.record <= self.held_out

    def fingerprint(self) -> list[object]:
        """Return JSON values that change if the text may have changed.

        Of remote files only the first, which held-out text is from, is asked for its size and time:
        there may be thousands.
        """
        files = [
            file.fingerprint() if index == 0 or "://" not in str(file.path) else str(file.path)
            for index, file in enumerate(self.files)
        ]
        return [self.text_field, self.held_out, files]

    def identity(self) -> list[object]:
        """Return JSON values that are the same wherever the stream lies, to check a resume."""
        sizes = [
            file.fingerprint()[1] if "://" not in str(file.path) else -1 for file in self.files
        ]
        names = [file.name for file in self.files]
        return [self.text_field, self.held_out, names, sizes]


class StreamPosition(NamedTuple):
    """Place in the order of a reader, between two tokens."""

    epoch: int = 0
    file: int = 0
    """Files of the epoch that are read to their end, where the shuffle window begins."""
    offset: int = 0
    """Bytes (rows of Parquet) of the next file before the shuffle window."""
    record: int = 0
    """Lines or rows of that file before the shuffle window."""
    document: int = 0
    """Documents of the shuffle window, in its order, that are used up."""
    token: int = 0
    """Tokens of the next document that are used up, its separator included."""


class _Piece(NamedTuple):
    """A document that waits to be cut into windows."""

    tokens: np.ndarray  # [n], the separator first
    position: StreamPosition
    """Position of its first token."""


class StreamReader:
    """Windows of tokens of one source, read from some of its files, without end.

    Every epoch shuffles the files, and the documents of each shuffle window. Windows are cut one
    after the other from the concatenated documents, each in its frame.
    """

    def __init__(
        self,
        text: StreamedText,
        tokenizer: Tokenizer,
        *,
        files: Sequence[int],
        seeds: Sequence[int],
        shuffle_window: int,
        sequence_length: int,
        document_masking: bool,
        max_epochs: int,
    ):
        """Set up a reader of the files of these indices. Nothing is read yet.

        A `shuffle_window` of 1 keeps the order of the files. After `max_epochs` the source has run
        dry; 0: never.
        """
        self._text, self._tokenizer = text, tokenizer
        self._frame = DocumentFrame.of(tokenizer)
        self._files, self._seeds = np.array(files), tuple(seeds)
        self._shuffle_window, self._max_epochs = shuffle_window, max_epochs
        self._length, self._document_masking = sequence_length, document_masking
        self.seek(StreamPosition())

    @property
    def position(self) -> StreamPosition:
        """Position of the next window."""
        if not self._pieces:
            return self._start._replace(token=self._token)
        return self._pieces[0].position._replace(token=self._token)

    def seek(self, position: StreamPosition) -> None:
        """Continue from a position."""
        self._start, self._token = position._replace(token=0), position.token
        self._pieces: collections.deque[_Piece] = collections.deque()
        self._num_tokens = 0  # in the pieces
        self._records: Iterator[tuple[RecordPosition, Document]] | None = None
        self._records_at: tuple[int, int, RecordPosition] | None = None
        self._waiting = self._read_pieces()
        # An epoch from its start that has no token never will: its source is empty.
        self._tokens_of_epoch = 1 if position.file or position.offset or position.document else 0

    def windows(self, count: int) -> HostBatch:
        """Return the next windows: tokens, targets, segments and positions [count, T]."""
        needed = count * self._length + 1  # windows share the token between them
        while self._num_tokens - self._token < needed:
            piece = next(self._waiting)
            self._pieces.append(piece)
            self._num_tokens += len(piece.tokens)
        tokens: list[np.ndarray] = []
        starts, length = [], -self._token
        for piece in self._pieces:
            starts.append(max(length, 0))
            tokens.append(piece.tokens)
            length += len(piece.tokens)
            if length >= needed:
                break
        # One token more: `Windows` takes the last for the first, as of a circle.
        run = np.concatenate(tokens)[self._token : self._token + needed]
        places = np.array(starts, np.int64)
        stream = TokenStream("train", np.append(run, 0), places, 0, first=self._frame.first)
        windows = Windows(stream, self._length, document_masking=self._document_masking)
        self._advance(count * self._length)
        return windows.cut(np.arange(count) * self._length)

    def _advance(self, count: int) -> None:
        self._token += count
        while self._pieces and self._token >= len(self._pieces[0].tokens):
            size = len(self._pieces.popleft().tokens)
            self._token -= size
            self._num_tokens -= size

    def _read_pieces(self) -> Iterator[_Piece]:
        """Yield the documents from the start position on, tokenized."""
        start = self._start
        while True:
            texts, following = self._read_window(start)
            order = np.arange(len(texts))
            if self._shuffle_window > 1:
                # Lines, not bytes: the order is the same in Parquet and in JSON lines.
                seeds = (*self._seeds, start.epoch, start.file, start.record)
                order = seeded_permutation(len(texts), *seeds)
            rest = [texts[index] for index in order[start.document :]]
            encoded = self._tokenizer.encode_documents(rest)
            for number, own in enumerate(encoded, start=start.document):
                piece = self._frame.piece(own)
                if len(piece):
                    self._tokens_of_epoch += len(piece)
                    yield _Piece(piece, start._replace(document=number))
            if following.epoch > start.epoch:
                self._check_not_dry(following.epoch)
                self._tokens_of_epoch = 0
            start = following

    def _check_not_dry(self, epochs: int) -> None:
        """Raise UserError after an epoch without a token, and after the last epoch."""
        where = f"{self._text.section} {self._text.name}"
        if not self._tokens_of_epoch:
            raise UserError(
                f"{where}: has no text to train on besides its {self._text.held_out} held-out "
                "documents; give more files, a validation_path, or lower "
                "data.streaming.validation_documents"
            )
        if epochs == self._max_epochs:
            raise UserError(
                f"{where}: is used up after {epochs} epochs; raise its max_epochs to go on, or "
                "lower steps"
            )

    def _read_window(self, start: StreamPosition) -> tuple[list[str], StreamPosition]:
        """Return the texts of a shuffle window, in the order of the files, and where it ends."""
        order = self._files
        if self._shuffle_window > 1:
            order = order[seeded_permutation(len(order), *self._seeds, start.epoch)]
        texts: list[str] = []
        characters = 0
        at = RecordPosition(start.offset, start.record)
        for file in range(start.file, len(order)):
            index = int(order[file])
            for position, document in self._records_from(start.epoch, file, index, at):
                self._records_at = (start.epoch, file, position)
                if self._text.is_held_out(index, position):
                    continue
                texts.append(text := document.text)
                characters += len(text)
                if len(texts) == self._shuffle_window or characters >= MAX_WINDOW_CHARACTERS:
                    return texts, StreamPosition(start.epoch, file, *position)
            at = RecordPosition()
        return texts, StreamPosition(start.epoch + 1)

    def _records_from(
        self, epoch: int, file: int, index: int, at: RecordPosition
    ) -> Iterator[tuple[RecordPosition, Document]]:
        """Return the documents of a file from a position on.

        The file of the window before stays open: a compressed one cannot be entered in its middle.
        """
        if self._records is None or self._records_at != (epoch, file, at):
            self._records = self._text.records(index, at)
        return self._records


class RowGroup:
    """Consecutive rows of every batch, which one reader of each source fills."""

    def __init__(self, readers: list[StreamReader], schedule: MixtureSchedule, num_rows: int):
        self.readers, self._schedule, self._num_rows = readers, schedule, num_rows
        self._last: HostBatch = {}
        self.seek(0, [StreamPosition()] * len(readers))

    def seek(self, cursor: int, positions: list[StreamPosition]) -> None:
        """Continue with batch `cursor`, from a position of each source."""
        self._positions = {cursor: positions}
        self._move(cursor, positions)

    def position(self, cursor: int) -> tuple[int, list[StreamPosition]]:
        """Return the kept position nearest before a batch, and the batch it is of."""
        known = max((each for each in self._positions if each <= cursor), default=None)
        if known is None:
            return 0, [StreamPosition()] * len(self.readers)
        return known, self._positions[known]

    def rows(self, cursor: int) -> HostBatch:
        """Return the rows of a batch. The next batch is read; others need a way back or forward."""
        if cursor + 1 == self._cursor and self._last:
            return self._last
        if cursor < self._cursor:
            self._move(*self.position(cursor))
        while self._cursor <= cursor:
            self._last = self._read()
        return self._last

    def _move(self, cursor: int, positions: list[StreamPosition]) -> None:
        self._cursor, self._last = cursor, {}
        for reader, position in zip(self.readers, positions, strict=True):
            if reader.position != position:
                reader.seek(position)

    def _read(self) -> HostBatch:
        """Return the rows of the next batch."""
        first = self._cursor * self._num_rows
        sources, _ = self._schedule.draw(np.arange(first, first + self._num_rows))
        batch = mix_rows(sources, lambda n, rows: self.readers[n].windows(int(rows.sum())))
        self._cursor += 1
        self._positions[self._cursor] = [reader.position for reader in self.readers]
        while len(self._positions) > KEPT_POSITIONS:
            del self._positions[next(iter(self._positions))]
        return batch


class StreamedTrainingBatches(TrainingBatches):
    """Endless training batches of streamed sources, mixed by weight.

    The rows of a batch are in groups, one for each of `data.streaming.readers`. A host reads the
    groups of its rows, so the batches do not depend on the number of hosts. Batches are read in
    order; `position` and `seek` return to a place without reading what is before it.
    """

    def __init__(
        self,
        names: list[str],
        weights: list[float],
        make_reader: Callable[[int, int], StreamReader],
        *,
        batch_size: int,
        readers: int,
        seed: int,
    ):
        """Set up the batches of sources with these names and weights. Nothing is read yet.

        `make_reader` returns the reader of a source (index) and a group of rows (index).
        """
        if batch_size % readers:
            raise UsageError(
                f"data.streaming.readers {readers}: does not divide batch_size {batch_size}; give "
                "a divisor of it"
            )
        self.batch_size = batch_size
        self._names = names
        self._rows = batch_size // readers
        self._schedules = [MixtureSchedule(weights, seed, group) for group in range(readers)]
        self._groups = [
            RowGroup([make_reader(n, group) for n in range(len(names))], schedule, self._rows)
            for group, schedule in enumerate(self._schedules)
        ]
        self._lock = threading.Lock()

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        start, stop = host_rows(self.batch_size, host, num_hosts)
        groups = range(start // self._rows, -(-stop // self._rows))
        with self._lock:
            parts = [self._groups[group].rows(cursor) for group in groups]
        skipped = start - groups.start * self._rows
        batch = {
            name: np.concatenate([part[name] for part in parts])[skipped : skipped + stop - start]
            for name in parts[0]
        }
        first = cursor * self.batch_size
        batch["examples"] = example_ids(np.arange(first + start, first + stop))
        return batch

    def source_shares(self, cursor: int) -> dict[str, float]:
        examples = cursor * self._rows
        counts = np.sum([each.examples_before(examples) for each in self._schedules], axis=0)
        total = max(1, cursor * self.batch_size)
        return dict(zip(self._names, (counts / total).tolist(), strict=True))

    def position(self, cursor: int) -> Any:
        """Return for each group of rows a batch at or before `cursor` and its position in the data.

        All processes call it together: each knows only the groups that it reads.
        """
        with self._lock:
            nearest = [group.position(cursor) for group in self._groups]
        known = np.array([[batch, *np.ravel(each)] for batch, each in nearest], np.int64)
        if jax.process_count() > 1:
            # As 32-bit words: without x64, JAX would truncate offsets of large files.
            gathered = multihost_utils.process_allgather(known.view(np.int32))
            everywhere = np.ascontiguousarray(gathered).view(np.int64)  # [processes, groups, ...]
            # Of each group, that of the process which has read it.
            latest = everywhere[:, :, 0].argmax(axis=0)
            known = everywhere[latest, np.arange(len(known))]
        return known.tolist()

    def seek(self, position: Any) -> None:
        start = [0] * (1 + len(self._names) * len(StreamPosition._fields))
        with self._lock:
            for group, (cursor, *values) in zip(
                self._groups, position or [start] * len(self._groups), strict=True
            ):
                each = np.reshape(values, (len(self._names), -1)).tolist()
                group.seek(cursor, [StreamPosition(*row) for row in each])
