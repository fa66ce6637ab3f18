"""Sequences of many lengths in one array, and padded to one length when they are needed.

Examples of like length put together, so that batches have few shapes and little padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedArray:
    """Sequences of numbers, one after the other."""

    values: np.ndarray  # [n] int32
    offsets: np.ndarray  # [sequences + 1] int64
    """Where each sequence begins in flat, and where the last one ends."""

    @classmethod
    def from_sequences(cls, sequences: Sequence[np.ndarray]) -> RaggedArray:
        """The sequences, in order."""
        lengths = [len(sequence) for sequence in sequences]
        flat = np.concatenate([np.zeros(0, np.int32), *sequences]).astype(np.int32)
        return cls(flat, np.cumsum([0, *lengths], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> np.ndarray:  # [t] int32
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> np.ndarray:  # [sequences] int64
        return np.diff(self.offsets)

    def pad(
        self,
        indices: np.ndarray,  # [B] int64
        length: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Some of the sequences as the rows of an array.

        Args:
          numbers: Which sequences; -1 is an empty one.
          length: T, at least the length of the longest of them.

        Returns:
          The numbers [B, T] int32, 0 in padding, and where they are real [B, T] bool.
        """
        lengths = np.where(indices < 0, 0, self.lengths[indices])  # [B]
        place = np.arange(length)  # [T]
        real = place < lengths[:, None]  # [B, T]
        source = np.where(real, self.offsets[indices][:, None] + place, 0)  # [B, T]
        return np.where(real, self.values[source], 0), real


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Examples that are padded to the same lengths."""

    batch_size: int
    """Rows in a batch, B."""

    lengths: tuple[int, ...]
    """The length of each side: source and target, or the only one."""

    examples: np.ndarray  # [n] int64
    """Their numbers, in order."""


def bucket_by_tokens(
    lengths: np.ndarray,  # [n, sides]
    *,
    batch_tokens: int,
    batch_size: int = 0,
    batch_size_multiple: int = 1,
    max_buckets: int = 8,
) -> tuple[Bucket, ...]:
    """Buckets whose batches have about as many tokens: the shorter the examples, the more rows.

    Args:
      lengths: Of each side of each example.
      batch_tokens: Rows times the longer side of a batch is at most this, if row_multiple allows.
        It is less where fewer rows hold the bucket's examples in as many batches.
      batch_size: A batch has at most this many rows; 0: no such limit.
      row_multiple: Every batch has a multiple of this many rows.
      most: At most this many buckets: each shape is a program that has to be compiled.
    """

    def rows(count: int, longer: int) -> int:
        room = min(batch_tokens // longer, batch_size or batch_tokens)
        most_rows = max(1, room // batch_size_multiple) * batch_size_multiple
        even = -(-count // -(-count // most_rows))  # dealt evenly over as few batches
        return -(-even // batch_size_multiple) * batch_size_multiple

    return _buckets(lengths, rows, max_buckets)


def bucket_by_rows(
    lengths: np.ndarray,  # [n, sides]
    *,
    batch_size: int,
    max_buckets: int = 8,
) -> tuple[Bucket, ...]:
    """As `buckets_by_tokens`, but every batch has ``batch_size`` rows."""
    return _buckets(lengths, lambda *_: batch_size, max_buckets)


def _buckets(
    lengths: np.ndarray,  # [n, sides]
    rows: Callable[[int, int], int],  # of the number of examples and their longer side
    most: int,
) -> tuple[Bucket, ...]:
    longer = lengths.max(axis=1)  # [n]
    which = np.searchsorted(_edges(longer, most), longer)  # [n]
    found = []
    for bucket in range(which.max() + 1):
        examples = np.flatnonzero(which == bucket)
        sides = tuple(int(side) for side in lengths[examples].max(axis=0))
        found.append(Bucket(rows(len(examples), max(sides)), sides, examples))
    return tuple(found)


def _edges(
    longer: np.ndarray,  # [n]
    most: int,
) -> np.ndarray:  # [buckets], ascending
    """The greatest length of each bucket, chosen so that all padded examples are least in sum.

    Dynamic programming: the best that k buckets can do for the examples of the shortest lengths
    follows from the best that k - 1 can do for fewer of them.
    """
    values, counts = np.unique(longer, return_counts=True)  # [m]
    before = np.cumsum([0, *counts])  # [m + 1], examples that are shorter than each value
    width = np.array([0, *values])  # what the last of them is padded to
    # One more bucket, from length `start` up to `end`, both included as "none": [end, start].
    size = np.maximum(before[:, None] - before[None, :], 0) * width[:, None]
    allowed = np.tri(len(before), dtype=bool)
    best = np.where(np.arange(len(before)) == 0, 0.0, np.inf)  # [m + 1], with no bucket yet
    choices = []
    for _ in range(most):
        sums = np.where(allowed, best[None, :] + size, np.inf)
        choices.append(sums.argmin(axis=1))
        best = sums.min(axis=1)
    edges, end = [], len(values)
    for choice in reversed(choices):
        if choice[end] < end:
            edges.append(values[end - 1])
        end = choice[end]
    return np.array(edges[::-1])
