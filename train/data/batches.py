"""Training batches: random access by cursor, in an order that the seed decides."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import numpy as np

from train.data.streams import TokenStream
from train.data.windows import HostBatch, Windows
from train.errors import UsageError, UserError

if TYPE_CHECKING:
    import grain


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
