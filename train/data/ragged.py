"""Sequences of many lengths in one array, and padded to one length when they are needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
