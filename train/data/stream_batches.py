"""Training batches of streamed sources: the rows of each reader, and positions to resume from."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.data.batches import example_ids, host_rows
from train.data.source_mixing import MixtureSchedule
from train.data.streaming import StreamPosition, StreamReader
from train.data.token_file import HostBatch
from train.errors import UsageError

KEPT_POSITIONS = 256
"""Positions of past batches that are kept. Loading is a few batches ahead of training, and a
rollback returns to a checkpoint, which has a position of its own."""

MakeReader = Callable[[int, int], StreamReader]
"""Function that returns the reader of a source (index) and a group of rows (index)."""


class RowGroup:
    """Consecutive rows of every batch, which one reader of each source fills."""

    def __init__(self, readers: list[StreamReader], schedule: MixtureSchedule, num_rows: int):
        self._readers, self._schedule, self._num_rows = readers, schedule, num_rows
        self._last: tuple[int, HostBatch] | None = None
        self.seek(0, [StreamPosition()] * len(readers))

    def seek(self, cursor: int, positions: list[StreamPosition]) -> None:
        """Continue with batch `cursor`, from a position of each source."""
        self._cursor = cursor
        self._positions: collections.OrderedDict[int, list[StreamPosition]]
        self._positions = collections.OrderedDict({cursor: positions})
        self._move(positions)

    def position(self, cursor: int) -> tuple[int, list[StreamPosition]]:
        """Return the kept position nearest before a batch, and the batch it is of."""
        known = max((each for each in self._positions if each <= cursor), default=None)
        if known is None:
            return 0, [StreamPosition()] * len(self._readers)
        return known, self._positions[known]

    def rows(self, cursor: int) -> HostBatch:
        """Return the rows of a batch. The next batch is read; others need a way back or forward."""
        if self._last is not None and self._last[0] == cursor:
            return self._last[1]
        if cursor < self._cursor:
            known, positions = self.position(cursor)
            self._cursor = known
            self._move(positions)
        while True:
            batch = self._read()
            if self._cursor > cursor:
                self._last = (cursor, batch)
                return batch

    def _move(self, positions: list[StreamPosition]) -> None:
        self._last = None
        for reader, position in zip(self._readers, positions, strict=True):
            if reader.position != position:
                reader.seek(position)

    def _read(self) -> HostBatch:
        """Return the rows of the next batch."""
        first = self._cursor * self._num_rows
        sources, _ = self._schedule.draw(np.arange(first, first + self._num_rows))
        batch: HostBatch = {}
        for number, reader in enumerate(self._readers):
            rows = sources == number
            if not rows.any():
                continue
            for name, array in reader.windows(int(rows.sum())).items():
                shape = (self._num_rows, *array.shape[1:])
                batch.setdefault(name, np.zeros(shape, array.dtype))[rows] = array
        self._cursor += 1
        self._positions[self._cursor] = [reader.position for reader in self._readers]
        while len(self._positions) > KEPT_POSITIONS:
            self._positions.popitem(last=False)
        return batch


class StreamedTrainingBatches:
    """Endless training batches of streamed sources, mixed by weight.

    The rows of a batch are in groups, one for each of `data.streaming.readers`. A host reads the
    groups of its rows, so the batches do not depend on the number of hosts. Batches are read in
    order; `position` and `seek` return to a place without reading what is before it.
    """

    def __init__(
        self,
        names: list[str],
        weights: list[float],
        make_reader: MakeReader,
        *,
        batch_size: int,
        readers: int,
        seed: int,
    ):
        """Set up the batches. Nothing is read yet.

        Args:
          names: Names of the sources.
          weights: Share of each source.
          make_reader: Returns the reader of a source and a group of rows.
          batch_size: Windows of a batch, over all hosts.
          readers: Groups of rows.
          seed: Seed of the mixture.

        Raises:
          UsageError: The rows cannot be divided among the readers.
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
        self._make_reader = make_reader
        self._groups: dict[int, RowGroup] = {}
        self._start: dict[int, tuple[int, list[StreamPosition]]] = {}
        self._lock = threading.Lock()

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """Return one host's rows of batch `cursor`. ``num_hosts`` must divide the batch size."""
        start, stop = host_rows(self.batch_size, host, num_hosts)
        with self._lock:
            groups = range(start // self._rows, -(-stop // self._rows))
            parts = [self._group(group).rows(cursor) for group in groups]
        skipped = start - groups.start * self._rows
        batch = {
            name: np.concatenate([part[name] for part in parts])[skipped : skipped + stop - start]
            for name in parts[0]
        }
        first = cursor * self.batch_size
        batch["examples"] = example_ids(np.arange(first + start, first + stop))
        return batch

    def source_shares(self, cursor: int) -> dict[str, float]:
        """Return the share of each source, by name, in the batches before `cursor`."""
        examples = cursor * self._rows
        counts = np.sum([each.examples_before(examples) for each in self._schedules], axis=0)
        total = max(1, cursor * self.batch_size)
        return dict(zip(self._names, (counts / total).tolist(), strict=True))

    def position(self, cursor: int) -> Any:
        """Return for each group of rows a batch at or before `cursor` and its position in the data.

        All processes call it together: each knows only the groups that it reads.
        """
        fields = len(StreamPosition._fields)
        # The first column is the batch. -1: this process has not read the group.
        known = np.full((len(self._schedules), 1 + fields * len(self._names)), -1, np.int64)
        with self._lock:
            for number, group in self._groups.items():
                batch, positions = group.position(cursor)
                known[number] = [batch, *np.array(positions).ravel()]
        if jax.process_count() > 1:
            # As 32-bit words: without x64, JAX would truncate offsets of large files.
            gathered = multihost_utils.process_allgather(known.view(np.int32))
            known = np.ascontiguousarray(gathered).view(np.int64).max(axis=0)
        return known.tolist()

    def seek(self, position: Any) -> None:
        """Continue from a result of `position`; None: from the start."""
        fields = len(StreamPosition._fields)
        with self._lock:
            self._start = {}
            for number, (cursor, *values) in enumerate(position or ()):
                if cursor >= 0:
                    each = np.array(values).reshape(-1, fields).tolist()
                    self._start[number] = cursor, [StreamPosition(*row) for row in each]
            for number, group in self._groups.items():
                group.seek(*self._start_of(number))

    def _start_of(self, number: int) -> tuple[int, list[StreamPosition]]:
        return self._start.get(number, (0, [StreamPosition()] * len(self._names)))

    def _group(self, number: int) -> RowGroup:
        if number not in self._groups:
            readers = [self._make_reader(source, number) for source in range(len(self._names))]
            group = RowGroup(readers, self._schedules[number], self._rows)
            group.seek(*self._start_of(number))
            self._groups[number] = group
        return self._groups[number]
