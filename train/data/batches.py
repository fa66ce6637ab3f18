"""Batches made ahead of time, on a thread of their own.

Training batches: random access by cursor, in an order that the seed decides.

Evaluation batches: every target of a stream once, in order.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
import logging
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from train.data.streams import HostBatch, TokenStream, Windows
from train.errors import UsageError, UserError

if TYPE_CHECKING:
    import grain
import dataclasses
from collections.abc import Iterator

Item = TypeVar("Item")


def prefetch(
    load: Callable[[int], Item], start: int = 0, *, buffer_size: int = 2
) -> Generator[tuple[int, Item]]:
    """Yields (cursor, load(cursor)) from ``start`` on, while the next ones are being loaded.

    What ``load`` raises is raised here, at its cursor. Closing the generator (``close()``, or
    ``contextlib.closing``) ends the thread.

    Args:
      load: For example ``batches.__getitem__``, or that and the copy to the device.
      start: The first cursor.
      ahead: How many are kept ready.
    """
    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        cursors = itertools.count(start)
        ready = collections.deque(
            (cursor, pool.submit(load, cursor)) for cursor in itertools.islice(cursors, buffer_size)
        )
        while True:
            cursor, item = ready.popleft()
            following = next(cursors)
            ready.append((following, pool.submit(load, following)))
            yield cursor, item.result()
    finally:
        pool.shutdown(cancel_futures=True)


class TextTrainingBatches:
    """The batches of a stream, without end: ``batches[cursor]`` is the batch of that cursor.

    Example e (row b of batch c is example c * batch_size + b) depends on the seed and e alone: not
    on the batch size, on what was read before, nor on how many hosts read. An epoch is a cut of
    the whole stream, taken as a circle, into windows side by side, in shuffled order. Each epoch
    cuts at other places. Every target is met once in an epoch, less those, fewer than a window,
    that are left where the circle closes.

    A batch has, for B windows of T tokens:

      tokens, targets: [B, T] int32, the tokens and the ones after them.
      weights: [B, T] float32, 1 for each target that counts.
      segments: [B, T] int32, the document within the window, from 1 on; 0 is padding.
      positions: [B, T] int32, the place within the document (as far as it is in the window).
      examples: [B] uint32, the number of each example (modulo 2**32), to fold into random keys.

    Attributes:
      windows_per_epoch: Windows in an epoch.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        document_masking: bool,
    ):
        """Makes the batches; nothing is read yet.

        Args:
          stream: What to cut windows from.
          batch_size: Windows in a batch, over all hosts.
          sequence_length: Tokens in a window, T.
          seed: Decides the order; any integer from 0 on.
          segments: Number the documents that share a window, or take it as one run of tokens.

        Raises:
          UserError: The stream is shorter than one window, or the seed is negative.
        """
        if seed < 0:
            raise UsageError(f"seed: {seed} is negative; give 0 or more")
        if stream.num_targets < sequence_length:
            raise UserError(
                f"the {stream.name} split: its {len(stream.tokens)} tokens are fewer than one "
                f"window of {sequence_length + 1}; give more text, or lower data.sequence_length "
                f"to {stream.num_targets} or less"
            )
        self.batch_size = batch_size
        self.windows_per_epoch = stream.num_targets // sequence_length
        self._length = sequence_length
        self._seed = seed
        self._order = _shuffled(self.windows_per_epoch, seed)
        self._windows = Windows(stream, sequence_length, document_masking=document_masking)

    def __getitem__(self, cursor: int) -> HostBatch:
        return self.rows(cursor, 0, self.batch_size)

    def rows(self, cursor: int, start: int, stop: int) -> HostBatch:
        """Rows ``start`` to ``stop`` of ``self[cursor]``: what one host of several needs."""
        first = cursor * self.batch_size
        examples = np.arange(first + start, first + stop)
        batch = self._windows.cut(np.array([self._begin(int(example)) for example in examples]))
        batch["weights"] = np.ones(batch["targets"].shape, np.float32)
        batch["examples"] = example_ids(examples)
        return batch

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """The share of one host of several in ``self[cursor]``, which ``num_hosts`` must divide."""
        return self.rows(cursor, *host_rows(self.batch_size, host, num_hosts))

    def _begin(self, example: int) -> int:
        """Return the place in the stream where the window of an example begins."""
        epoch = example // self.windows_per_epoch
        phase = _phase(self._seed, epoch, self._length)
        return phase + self._length * self._order[example]


def host_rows(batch_size: int, host: int, num_hosts: int) -> tuple[int, int]:
    """The first row of a batch that is one host's of several, and the one after its last."""
    each = batch_size // num_hosts
    return host * each, (host + 1) * each


def example_ids(
    examples: np.ndarray,  # [B] int64
) -> np.ndarray:  # [B] uint32
    """The numbers of examples modulo 2**32: what is folded into random keys."""
    return (examples % (1 << 32)).astype(np.uint32)


def _shuffled(count: int, seed: int) -> grain.MapDataset:
    """The numbers below ``count`` in another order for each epoch, without end."""
    # With a jaxlib before 0.11, as Colab has, grain warns of profiling that is not used here.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import grain
    finally:
        logger.setLevel(level)

    # Grain's shuffle of epoch e with seed s is that of epoch e - 1 with seed s + 1: spread them.
    spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return grain.MapDataset.range(count).shuffle(seed=spread).repeat()


@functools.lru_cache(maxsize=64)
def _phase(seed: int, epoch: int, length: int) -> int:
    """Return the place of an epoch's first cut, from 0 up to the length of a window."""
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0]) % length


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
