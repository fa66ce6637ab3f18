"""Batches of separate examples, padded to the lengths of their buckets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from train.data.batches import host_rows
from train.data.buckets import Bucket
from train.data.windows import HostBatch
from train.errors import UsageError


class Examples(Protocol):
    """A split of examples."""

    @property
    def lengths(self) -> np.ndarray:  # [n, sides]
        """Of each side of each example."""
        ...

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Some examples as a batch, padded to these lengths; number -1 is a row of zeros."""
        ...


class ExampleTrainingBatches:
    """Batches without end, each a pure function of the seed and its number.

    An epoch has every example once: each bucket's, in shuffled order, are dealt evenly over as few
    batches as hold them, and the batches of all buckets are shuffled. Rows that are left over are
    zeros. All epochs have as many batches, and another order.

    Attributes:
      batches_per_epoch: Batches in an epoch.
    """

    def __init__(self, examples: Examples, buckets: Sequence[Bucket], *, seed: int):
        """Makes the batches.

        Args:
          examples: The split.
          buckets: All its examples, each in one.
          seed: Decides the order; any integer from 0 on.

        Raises:
          UserError: The seed is negative.
        """
        if seed < 0:
            raise UsageError(f"seed: {seed} is negative; give 0 or more")
        self._examples, self._buckets = examples, buckets
        self._deals = batch_slices(buckets)
        self._seed = seed
        self.batches_per_epoch = len(self._deals)

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """The rows of batch ``cursor`` that are the share of one host of several."""
        epoch, place = divmod(cursor, self.batches_per_epoch)
        deal = self._deals[seeded_permutation(self.batches_per_epoch, self._seed, epoch)[place]]
        bucket = self._buckets[deal.bucket]
        order = seeded_permutation(len(bucket.examples), self._seed, epoch, 1 + deal.bucket)
        chosen = bucket.examples[order[deal.start : deal.stop]]
        return _rows(self._examples, bucket, chosen, host, num_hosts)


class ExampleEvaluationBatches:
    """Every example of a split once: the batches of each bucket in order, the shortest first."""

    def __init__(
        self, examples: Examples, buckets: Sequence[Bucket], *, max_batches: int | None = None
    ):
        """Makes the batches.

        Args:
          examples: The split.
          buckets: As of `TrainingBatches`.
          limit: At most this many batches, spread evenly over all. None or 0: all.
        """
        self._examples, self._buckets = examples, buckets
        every = batch_slices(buckets)
        count = min(len(every), max_batches or len(every))
        self._deals = [every[number * len(every) // count] for number in range(count)]

    def __len__(self) -> int:
        return len(self._deals)

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """As that of `TrainingBatches`. A row of weight 0 throughout is none of the examples."""
        deal = self._deals[cursor]
        bucket = self._buckets[deal.bucket]
        chosen = bucket.examples[deal.start : deal.stop]
        return _rows(self._examples, bucket, chosen, host, num_hosts)


class BatchSlice(NamedTuple):
    """What one batch has: the examples of a bucket from ``start`` up to ``stop``."""

    bucket: int
    start: int
    stop: int


def batch_slices(buckets: Sequence[Bucket]) -> list[BatchSlice]:
    """Deals the examples of each bucket evenly over as few batches as hold them."""
    found = []
    for number, bucket in enumerate(buckets):
        count = len(bucket.examples)
        batches = -(-count // bucket.batch_size)
        cuts = [batch * count // batches for batch in range(batches + 1)]
        found += [BatchSlice(number, *cut) for cut in itertools.pairwise(cuts)]
    return found


@functools.lru_cache(maxsize=64)
def seeded_permutation(count: int, *seeds: int) -> np.ndarray:  # [count] int64
    """The numbers below ``count`` in an order that the seeds decide.

    It sorts the raw stream of a generator, which NumPy promises never to change.
    """
    stream = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    return np.argsort(stream, kind="stable")


def _rows(
    examples: Examples,
    bucket: Bucket,
    chosen: np.ndarray,  # [at most rows] int64
    host: int,
    hosts: int,
) -> HostBatch:
    numbers = np.full(bucket.batch_size, -1)
    numbers[: len(chosen)] = chosen
    return examples.batch(
        numbers[slice(*host_rows(bucket.batch_size, host, hosts))], bucket.lengths
    )
