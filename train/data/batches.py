"""Batches of windows of text, for training and evaluation, and prefetching of batches."""

import abc
import collections
import concurrent.futures
import functools
import itertools
import logging
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from train.data.token_file import HostBatch, TokenStream, Windows
from train.errors import UserError

if TYPE_CHECKING:
    import grain

Item = TypeVar("Item")


def prefetch(
    load: Callable[[int], Item], start: int = 0, *, buffer_size: int = 2
) -> Generator[tuple[int, Item]]:
    """Yield (cursor, load(cursor)) from ``start`` on, loading ahead in a thread.

    An exception of ``load`` is raised here, at its cursor. Closing the generator (``close()``, or
    ``contextlib.closing``) ends the thread.

    Args:
      load: For example ``batches.host_batch`` of one host, and the copy to the device.
      start: The first cursor.
      buffer_size: Number of items to load ahead.
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


class TrainingBatches(abc.ABC):
    """Endless sequence of training batches, each a pure function of the seed and the cursor."""

    @property
    def one_shape(self) -> bool:
        """True if all batches have the shapes of batch 0, which takes no time to make."""
        return False

    @abc.abstractmethod
    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """Return the rows of batch `cursor` that belong to one host; hosts divide the batch size.

        The arrays include `examples` [B] uint32 and the `weights` of the targets.
        """

    def position(self, cursor: int) -> Any:
        """Return what finds batch `cursor` again without reading what is before it, as JSON.

        None, as by default: the cursor alone is enough. All processes call it together.
        """
        return None

    def seek(self, position: Any) -> None:
        """Continue from a result of `position`; None: from the start."""
        del position  # by default the cursor alone finds every batch

    def source_shares(self, cursor: int) -> dict[str, float]:
        """Return the share of each of several sources, by name, in the batches before `cursor`."""
        return {}


class TextTrainingBatches(TrainingBatches):
    """Endless training batches of a token stream, each a pure function of the seed and the cursor.

    Example e (row b of batch c is example c * batch_size + b) is a pure function of the seed and e.
    It does not depend on the batch size, on earlier reads, or on the number of hosts. An epoch cuts
    the stream, taken as a circle, into adjacent windows and shuffles them. Every epoch cuts at
    different places. An epoch has every target once, except those left over where the circle closes
    (fewer than a window).

    A batch has, for B windows of T tokens:

      tokens, targets: [B, T] int32, the tokens and the next tokens.
      weights: [B, T] float32, 1 for each target that counts.
      segments: [B, T] int32, index of the document within the window, from 1; 0 is padding.
      positions: [B, T] int32, position within the document (as far as it is in the window).
      examples: [B] uint32, example index modulo 2**32, folded into the dropout keys.

    Attributes:
      windows_per_epoch: Number of windows of an epoch.
    """

    one_shape = True

    def __init__(
        self,
        stream: TokenStream,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        document_masking: bool,
    ):
        """Set up the batches. Nothing is read yet.

        Args:
          stream: Token stream to cut windows from.
          batch_size: Windows of a batch, over all hosts.
          sequence_length: Tokens of a window, T.
          seed: Seed of the order, at least 0.
          document_masking: Number the documents of a window, and do not treat it as one run of
            tokens.

        Raises:
          UserError: The stream is shorter than one window.
        """
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

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        start, stop = host_rows(self.batch_size, host, num_hosts)
        first = cursor * self.batch_size
        return self.examples(np.arange(first + start, first + stop))

    def examples(
        self,
        examples: np.ndarray,  # [B] int64
    ) -> HostBatch:
        """Return the windows of these examples, with the arrays of a batch."""
        batch = self._windows.cut(np.array([self._begin(int(example)) for example in examples]))
        batch["examples"] = example_ids(examples)
        return batch

    def _begin(self, example: int) -> int:
        """Return the position in the stream of the first token of an example's window."""
        epoch = example // self.windows_per_epoch
        phase = _phase(self._seed, epoch, self._length)
        return phase + self._length * self._order[example]


def host_rows(batch_size: int, host: int, num_hosts: int) -> tuple[int, int]:
    """Return the range of rows [start, stop) of a batch that belongs to one host."""
    each = batch_size // num_hosts
    return host * each, (host + 1) * each


def example_ids(
    examples: np.ndarray,  # [B] int64
) -> np.ndarray:  # [B] uint32
    """Return example indices modulo 2**32, to be folded into random keys."""
    return (examples % (1 << 32)).astype(np.uint32)


@functools.lru_cache(maxsize=64)
def seeded_permutation(count: int, *seeds: int) -> np.ndarray:  # [count] int64
    """Return the indices below ``count``, permuted by the seeds."""
    # Sort the raw output of PCG64, which NumPy promises never to change. The algorithms of
    # `Generator.permutation` may change between versions, and with them the order of the data.
    keys = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    return np.argsort(keys, kind="stable")


def _shuffled(count: int, seed: int) -> "grain.MapDataset[int]":
    """Return the indices below ``count``, shuffled anew in each epoch, without end."""
    # With a jaxlib before 0.11 (Colab), importing grain logs a warning about profiling.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import grain
    finally:
        logger.setLevel(level)

    # Grain's shuffle of epoch e with seed s is that of epoch e - 1 with seed s + 1. Hash the seed,
    # so that runs with adjacent seeds do not share their orders.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return grain.MapDataset.range(count).shuffle(seed=hashed).repeat()


@functools.lru_cache(maxsize=64)
def _phase(seed: int, epoch: int, length: int) -> int:
    """Return the position of the first cut of an epoch, in [0, length)."""
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0]) % length


class TextEvaluationBatches:
    """Windows over a stream so that each target counts once.

    Batches have the arrays of `TextTrainingBatches`, all of one shape. Weights are 1 where a target
    counts in its window. Everything is 0 in padding: beyond the end of the stream, and in the rows
    that fill up the last batch.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        batch_size: int,
        sequence_length: int,
        document_masking: bool,
        stride: int | None = None,
        max_batches: int | None = None,
    ):
        """Lay the windows.

        Args:
          stream: Token stream to evaluate on; it may be shorter than a window.
          batch_size: Windows of a batch, over all hosts.
          sequence_length: Tokens of a window, T.
          document_masking: As in training.
          stride: Distance between the starts of adjacent windows. Below T, windows overlap and each
            counts only its last ``stride`` targets (the first window: all), so that every target
            has at least T - stride tokens of context, as far as its document has them. None or 0:
            T.
          max_batches: Maximum number of batches, of windows spread evenly over the stream. None or
            0: all.

        Raises:
          ValueError: stride is longer than a window, which would skip targets.
        """
        self.stride = stride or sequence_length
        if not 0 < self.stride <= sequence_length:
            raise ValueError(f"stride {stride} is not in 1 to {sequence_length}")
        count = 1 + -(-max(0, stream.num_targets - sequence_length) // self.stride)
        chosen = min(count, max_batches * batch_size) if max_batches else count
        self.windows = Windows(stream, sequence_length, document_masking=document_masking)
        self.window_indices = np.arange(chosen) * count // chosen  # as multiples of the stride
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.window_indices) // self.batch_size)

    def __iter__(self) -> Iterator[HostBatch]:
        return (self.host_batch(cursor, 0, 1) for cursor in range(len(self)))

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """Return one host's rows of a batch. ``num_hosts`` must divide the batch size."""
        start, stop = host_rows(self.batch_size, host, num_hosts)
        window_length = self.windows.window_length
        first = cursor * self.batch_size
        examples = np.arange(first + start, first + stop)  # [B]
        filled = examples < len(self.window_indices)
        window = self.window_indices[np.where(filled, examples, 0)]  # [B]
        starts = window * self.stride  # [B]
        offset = np.arange(window_length)  # [T]
        # The stream is a circle, but an evaluation ends where it closes.
        real = filled[:, None] & (starts[:, None] + offset < self.windows.num_targets)  # [B, T]
        # Overlapping windows: the one before has counted all but the last `stride` targets.
        num_context = np.where(window > 0, window_length - self.stride, 0)  # [B]
        batch = {name: np.where(real, array, 0) for name, array in self.windows.cut(starts).items()}
        batch["weights"] *= offset >= num_context[:, None]
        batch["examples"] = example_ids(examples)
        return batch
