"""Ragged arrays, and buckets of examples of similar length.

Buckets limit the number of batch shapes, each of which is a program to compile, and the padding.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedArray:
    """Integer sequences of different lengths, concatenated in one array."""

    values: np.ndarray  # [n] int32
    offsets: np.ndarray  # [sequences + 1] int64
    """Offset of each sequence in values, then the total length."""

    @classmethod
    def from_sequences(cls, sequences: Sequence[np.ndarray]) -> "RaggedArray":
        """Concatenate sequences."""
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
        """Return some of the sequences as rows of a padded array.

        Args:
          indices: Sequences to return; -1 is an empty one.
          length: T, at least the length of the longest of them.

        Returns:
          The values [B, T] int32, 0 in padding, and a mask [B, T] that is True where they are no
          padding.
        """
        lengths = np.where(indices < 0, 0, self.lengths[indices])  # [B]
        position = np.arange(length)  # [T]
        real = position < lengths[:, None]  # [B, T]
        source = np.where(real, self.offsets[indices][:, None] + position, 0)  # [B, T]
        return np.where(real, self.values[source], 0), real


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Examples that are padded to the same lengths."""

    batch_size: int
    """Rows of a batch, B."""

    lengths: tuple[int, ...]
    """Padded length of each side: of source and target, or of the only side."""

    examples: np.ndarray  # [n] int64
    """Indices of the examples, ascending."""


def bucket_by_tokens(
    lengths: np.ndarray,  # [n, sides]
    *,
    batch_tokens: int,
    batch_size: int = 0,
    batch_size_multiple: int = 1,
    max_buckets: int = 8,
) -> tuple[Bucket, ...]:
    """Return buckets with about equal tokens a batch: the shorter the examples, the more rows.

    Args:
      lengths: Length of each side of each example.
      batch_tokens: Upper bound of rows times the longer side of a batch, if batch_size_multiple
        permits. It is lower where fewer rows hold the bucket's examples in as many batches.
      batch_size: Maximum number of rows of a batch; 0: no such limit.
      batch_size_multiple: The rows of every batch are a multiple of this.
      max_buckets: Maximum number of buckets. Each shape is a program to compile.
    """

    def rows(count: int, longer: int) -> int:
        room = min(batch_tokens // longer, batch_size or batch_tokens)
        max_rows = max(1, room // batch_size_multiple) * batch_size_multiple
        num_batches = -(-count // max_rows)
        # Deal the examples evenly: full batches and a small last one would need more padding.
        even_rows = -(-count // num_batches)
        return -(-even_rows // batch_size_multiple) * batch_size_multiple

    return _buckets(lengths, rows, max_buckets)


def bucket_by_rows(
    lengths: np.ndarray,  # [n, sides]
    *,
    batch_size: int,
    max_buckets: int = 8,
) -> tuple[Bucket, ...]:
    """Return buckets whose batches all have ``batch_size`` rows. See `bucket_by_tokens`."""
    return _buckets(lengths, lambda *_: batch_size, max_buckets)


def _buckets(
    lengths: np.ndarray,  # [n, sides]
    rows: Callable[[int, int], int],  # of the number of examples and their longer side
    max_buckets: int,
) -> tuple[Bucket, ...]:
    longer = lengths.max(axis=1)  # [n]
    bucket_of = np.searchsorted(_edges(longer, max_buckets), longer)  # [n]
    buckets = []
    for bucket in range(bucket_of.max() + 1):
        examples = np.flatnonzero(bucket_of == bucket)
        sides = tuple(int(side) for side in lengths[examples].max(axis=0))
        buckets.append(Bucket(rows(len(examples), max(sides)), sides, examples))
    return tuple(buckets)


def _edges(
    longer: np.ndarray,  # [n]
    max_buckets: int,
) -> np.ndarray:  # [buckets], ascending
    """Return the padded length of each bucket, such that the sum of all padded lengths is minimal.

    Dynamic programming: the best result of k buckets for the examples up to some length follows
    from the best results of k - 1 buckets for fewer of them.
    """
    values, counts = np.unique(longer, return_counts=True)  # [m]
    before = np.cumsum([0, *counts])  # [m + 1], number of examples up to each value, from none
    width = np.array([0, *values])  # [m + 1], padded length of a bucket that ends at each value
    # size[end, start]: padded length of the bucket of the examples after `start` up to `end`.
    size = np.maximum(before[:, None] - before[None, :], 0) * width[:, None]
    allowed = np.tri(len(before), dtype=bool)
    best = np.where(np.arange(len(before)) == 0, 0.0, np.inf)  # [m + 1], with no bucket yet
    starts = []  # for each number of buckets, the best start of the last one, by its end
    for _ in range(max_buckets):
        sums = np.where(allowed, best[None, :] + size, np.inf)
        starts.append(sums.argmin(axis=1))
        best = sums.min(axis=1)
    # Walk back from the end of all examples through the best starts. Empty buckets are skipped.
    edges, end = [], len(values)
    for start in reversed(starts):
        if start[end] < end:
            edges.append(values[end - 1])
        end = start[end]
    return np.array(edges[::-1])
