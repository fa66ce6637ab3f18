"""Evaluation batches: every target of a stream once, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from train.data.batches import example_ids, host_rows
from train.data.streams import TokenStream
from train.data.windows import HostBatch, Windows


def make_text_evaluation_batches(
    stream: TokenStream,
    *,
    batch_size: int,
    sequence_length: int,
    document_masking: bool,
    stride: int | None = None,
    max_batches: int | None = None,
) -> TextEvaluationBatches:
    """Lays windows over a stream so that each target counts once.

    Args:
      stream: What to evaluate on; it may be shorter than a window.
      batch_size: Windows in a batch, over all hosts.
      sequence_length: Tokens in a window, T.
      segments: As in training.
      stride: How much further each window begins. Below T, windows overlap and each counts only
        its last ``stride`` targets (the first window: all), so that every target has at least
        T - stride tokens before it, as far as its document has. None or 0: T.
      limit: At most this many batches, of windows spread evenly over the stream. None or 0: all.

    Raises:
      ValueError: stride is longer than a window, so that targets would be left out.
    """
    stride = stride or sequence_length
    if not 0 < stride <= sequence_length:
        raise ValueError(f"stride {stride} is not in 1 to {sequence_length}")
    count = 1 + -(-max(0, stream.num_targets - sequence_length) // stride)
    chosen = min(count, max_batches * batch_size) if max_batches else count
    return TextEvaluationBatches(
        windows=Windows(stream, sequence_length, document_masking=document_masking),
        window_indices=np.arange(chosen) * count // chosen,
        stride=stride,
        batch_size=batch_size,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TextEvaluationBatches:
    """Batches with the arrays of `train.data.batches.TextTrainingBatches`, all of one shape.

    Weights are 1 where a target counts in this window. Everything is 0 in padding: beyond the end
    of the stream, and in the rows that fill up the last batch.
    """

    windows: Windows
    window_indices: np.ndarray  # [windows], which of the windows at multiples of stride
    stride: int
    batch_size: int

    def __len__(self) -> int:
        return -(-len(self.window_indices) // self.batch_size)

    def __iter__(self) -> Iterator[HostBatch]:
        return (self[cursor] for cursor in range(len(self)))

    def __getitem__(self, cursor: int) -> HostBatch:
        return self.rows(cursor, 0, self.batch_size)

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """The share of one host of several in ``self[cursor]``, which ``num_hosts`` must divide."""
        return self.rows(cursor, *host_rows(self.batch_size, host, num_hosts))

    def rows(self, cursor: int, start: int, stop: int) -> HostBatch:
        """Rows ``start`` to ``stop`` of ``self[cursor]``: what one host of several needs."""
        if not 0 <= cursor < len(self):
            raise IndexError(f"batch {cursor} of {len(self)}")
        first = cursor * self.batch_size
        examples = np.arange(first + start, first + stop)  # [B]
        filled = examples < len(self.window_indices)
        window = self.window_indices[np.where(filled, examples, 0)]  # [B]
        begins = window * self.stride
        place = np.arange(self.windows.window_length)  # [T]
        real = filled[:, None] & (begins[:, None] + place < self.windows.num_targets)  # [B, T]
        counted_before = np.where(window > 0, self.windows.window_length - self.stride, 0)  # [B]
        batch = {name: np.where(real, array, 0) for name, array in self.windows.cut(begins).items()}
        batch["weights"] = (real & (place >= counted_before[:, None])).astype(np.float32)
        batch["examples"] = example_ids(examples)
        return batch
