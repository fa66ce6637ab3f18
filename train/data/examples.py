"""A corpus of separate examples: read, split, and kept in memory.

Batches of separate examples, padded to the lengths of their buckets.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from train.data.batches import host_rows
from train.data.buckets import Bucket
from train.data.cache import cache_key
from train.data.config import TokenizerConfig
from train.data.example_configs import ExampleDataConfig
from train.data.streams import HostBatch
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.errors import UsageError, UserError

Example = TypeVar("Example")


Split = TypeVar("Split")


ReadExamples = Callable[[str, str], Sequence[Example]]
"""Reads the examples of a path, given the name of its setting and the path."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleCorpus(Generic[Split]):
    """A tokenizer and the examples of all splits."""

    tokenizer: Tokenizer

    splits: Mapping[str, Split]
    """By name: "train", "validation" and, if asked for, "test"."""

    digest: str
    """Tells corpora apart: equal if all texts, labels, splits and tokens are."""

    labels: tuple[str, ...] = ()
    """The names of classes or tags, by number."""

    notes: tuple[str, ...] = ()
    """What was done to the examples that their owner should know, one sentence each."""

    def split(self, name: str) -> Split:
        """The examples of a split (UserError: there is none of that name)."""
        if name not in self.splits:
            remedy = "set data.test_path" if name == "test" else "choose one of these"
            raise UserError(
                f"split {name!r}: the data have only {', '.join(self.splits)}; {remedy}"
            )
        return self.splits[name]


def read_splits(
    config: ExampleDataConfig, read: ReadExamples[Example]
) -> dict[str, Sequence[Example]]:
    """The examples of every split; those of validation may be held out of those of training."""

    def examples_of(setting: str, path: str) -> Sequence[Example]:
        if examples := read(setting, path):
            return examples
        raise UserError(f"{setting} {path}: has no examples; give a file that has some")

    examples = examples_of("data.path", config.path)
    if config.validation_path:
        validation = examples_of("data.validation_path", config.validation_path)
    else:
        if len(examples) < 2:
            raise UserError(
                f"data.path {config.path}: one example is too few to hold one out; give more, or "
                "set data.validation_path"
            )
        drawn = choose_held_out_examples(
            len(examples), config.validation_fraction, config.split_seed
        )
        validation = [example for n, example in enumerate(examples) if n in drawn]
        examples = [example for n, example in enumerate(examples) if n not in drawn]
    splits = {"train": examples, "validation": validation}
    if config.test_path:
        splits["test"] = examples_of("data.test_path", config.test_path)
    return splits


def choose_held_out_examples(count: int, fraction: float, seed: int) -> frozenset[int]:
    """Draws a part of the numbers below ``count``: at least one is drawn and at least one is not.

    The order in which they are drawn is that of a hash, so that it is the same everywhere.
    """
    order = sorted(range(count), key=lambda number: _hash(f"{seed}:{number}"))
    return frozenset(order[: min(max(1, round(count * fraction)), count - 1)])


def tokenizer_for_splits(config: TokenizerConfig, texts: Mapping[str, Iterable[str]]) -> Tokenizer:
    """The tokenizer of the settings, learned from the texts of the training split."""
    # A character tokenizer can only take what it has met, so its alphabet is that of all splits.
    names = texts if config.kind == "character" else ("train",)
    return train_tokenizer(config, itertools.chain.from_iterable(texts[name] for name in names))


def label_indices(
    labels: Iterable[tuple[str, str]], label_names: Sequence[str], noun: str
) -> list[int]:
    """The number of each label's class.

    Args:
      labels: Each with its place in a file.
      names: The classes.
      what: What messages call a label.

    Raises:
      UserError: A label is none of the classes.
    """
    numbers = {name: number for number, name in enumerate(label_names)}
    found = []
    for label, where in labels:
        if label not in numbers:
            raise UserError(
                f"{where}: {noun} {label!r} is none of those of training ({preview_names(label_names)}); mend it, "
                "or leave it out"
            )
        found.append(numbers[label])
    return found


def corpus_digest(tokenizer: Tokenizer, splits: Mapping[str, object]) -> str:
    """What tells corpora apart, from their tokenizer and what was read, as JSON has it."""
    return cache_key(tokenizer.digest, splits)


def with_leading_space(texts: Iterable[str]) -> list[str]:
    """Each text with a space before it, so that its first word is the token it is elsewhere."""
    return [f" {text.strip()}" for text in texts]


def preview_names(names: Sequence[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


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
