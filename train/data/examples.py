"""Corpora of separate examples: splits, labels, and batches padded to the lengths of buckets."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from train.data.batches import TrainingBatches, host_rows, seeded_permutation
from train.data.buckets import Bucket
from train.data.data_config import DataConfig, TokenizerConfig
from train.data.files import (
    SPLITS,
    FindFiles,
    Notes,
    Split,
    TextFile,
    find_all_splits,
    find_splits,
    split_of,
)
from train.data.rows import located_rows
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError
from train.files import cache_key
from train.runtime.stages import stage
from train.settings import HostSeed
from transformer.validation import Bounds, Mark, PositiveInt


@dataclasses.dataclass(frozen=True)
class ExampleDataConfig(DataConfig):
    """Fields that all data with separate examples have: paths, splits, lengths, tokenizer.

    A path is a file, a folder or a glob, as of `TextDataConfig`. The formats
    are in docs/tasks.md.
    """

    path: Annotated[str, Mark.RESUMABLE, Mark.COMMON] = ""
    """Training examples. Held-out examples are taken from it unless there are validation files."""

    validation_path: Annotated[str, Mark.RESUMABLE] = ""
    """Validation examples. Empty: those of a folder that has files of this split, or held out of
    path."""

    test_path: Annotated[str, Mark.RESUMABLE] = ""
    """Test examples. Empty: those of a folder that has files of this split, or none."""

    validation_fraction: Annotated[float, Bounds(above=0, below=1)] = 0.1
    """Fraction of the examples of path to hold out if validation_path is empty."""

    split_seed: HostSeed = 0
    """Seed of the choice of held-out examples."""

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 128
    """Maximum number of tokens of an example."""

    max_buckets: PositiveInt = 8
    """Maximum number of lengths that examples are padded to. Each is a program to compile. 1: pad
    all examples to the longest."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """Settings of the tokenizer. It is trained on the training split."""

    @property
    def longest_example(self) -> int:
        return self.max_length


Example = TypeVar("Example")

ReadFiles = Callable[[Sequence[TextFile], Notes], Iterator[tuple[str, Any]]]
"""Function that yields the rows of files, each with its location for error messages."""

ParseRow = Callable[[str, Any], Example | None]
"""Function that makes an example of a location and a row; None: the row is left out."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleCorpus(Generic[Split]):
    """A tokenizer and the examples of all splits, in memory."""

    tokenizer: Tokenizer

    splits: Mapping[str, Split]
    """Examples by split: "train", "validation" and, if it is configured, "test"."""

    digest: str
    """Digest of texts, labels, splits and tokens: equal for equal data."""

    labels: tuple[str, ...] = ()
    """Names of the labels or tags by index."""

    notes: tuple[str, ...] = ()
    """Messages for the user about changes to the examples (truncated, removed), a sentence each."""

    def split(self, name: str) -> Split:
        """Return the examples of a split. Raises UserError if there is none of that name."""
        return split_of(self.splits, name)


class ExampleSplits(dict[str, Sequence[Example]]):
    """Examples by split: "train", "validation" and, if there is one, "test".

    Attributes:
      notes: What the user should know of how the examples were read, a line each.
      all_training: The training examples, with those that were held out of them.
    """

    def __init__(
        self,
        splits: Mapping[str, Sequence[Example]],
        notes: Sequence[str] = (),
        held_out: Sequence[Example] = (),
    ):
        super().__init__({split: splits[split] for split in SPLITS if split in splits})
        self.notes = list(notes)
        self.all_training = [*splits["train"], *held_out]


def read_splits(
    config: ExampleDataConfig,
    parse: ParseRow[Example],
    convert: ParseRow[Example] | None = None,
    *,
    read: ReadFiles = lambda files, notes: located_rows(*files),
    find: FindFiles = find_splits,
) -> ExampleSplits[Example]:
    """Return the examples of every split. Validation may be held out of the training examples.

    Args:
      config: Paths and splits.
      parse: Makes an example of a row.
      convert: Makes an example of what a dataset of the user yields (`DataConfig.read_split`);
        None: as `parse`.
      read: Reads the rows of the files of a split.
      find: Finds the files of a path.

    Raises:
      UserError: A split has no examples, or too few to hold some out.
    """
    notes = Notes()

    def examples_of(
        rows: Iterable[tuple[str, Any]], source: str, parse: ParseRow[Example]
    ) -> list[Example]:
        parsed = [parse(location, row) for location, row in rows]
        examples = [example for example in parsed if example is not None]
        if left_out := len(parsed) - len(examples):
            notes.add(source, "rows that are left out, as a field is null", left_out)
        return examples

    splits: dict[str, list[Example]] = {}
    if config.has_own_examples:
        dataset = f"dataset {type(config).__name__}"
        for split in SPLITS:
            if (in_split := config.read_split(split)) is not None:
                source = f"{dataset}, split {split}"
                rows = ((f"{source}, example {n}", each) for n, each in enumerate(in_split))
                splits[split] = examples_of(rows, source, convert or parse)
                if not splits[split]:
                    raise UserError(f"{source}: has no examples; yield some")
        if "train" not in splits:
            raise UserError(f"{dataset}: has no split train; return its examples from read_split")
    else:
        paths = config.path, config.validation_path, config.test_path
        for split, (setting, path, files) in find_all_splits(*paths, notes, find=find).items():
            source = f"{setting} {path}"
            if examples := examples_of(read(files, notes), source, parse):
                splits[split] = examples
            elif split == "train" or setting != "data.path":
                raise UserError(f"{source}: has no examples; give a file that has some")
    if "validation" in splits:
        return ExampleSplits(splits, notes.lines())
    examples = splits["train"]
    if len(examples) < 2:
        raise UserError(
            f"data.path {config.path}: a single example leaves none to hold out for "
            "validation; give more, or set data.validation_path"
        )
    chosen = choose_held_out_examples(len(examples), config.validation_fraction, config.split_seed)
    splits["train"] = [example for n, example in enumerate(examples) if n not in chosen]
    splits["validation"] = [example for n, example in enumerate(examples) if n in chosen]
    return ExampleSplits(splits, notes.lines(), splits["validation"])


def encode_splits(
    splits: ExampleSplits[Example],
    tokenizer: Tokenizer,
    encode: Callable[[str, Sequence[Example]], Split],
    *,
    content: Callable[[Example], object],
    labels: Sequence[str] = (),
    identity: Mapping[str, object] = MappingProxyType({}),
) -> ExampleCorpus[Split]:
    """Return the corpus of splits.

    Args:
      splits: The examples.
      tokenizer: Their tokenizer.
      encode: Makes a split of its name and its examples. It may append to the notes of `splits`.
      content: Returns what is learned from, as JSON values, for the digest. They do not have the
        location: the digest must not depend on the paths of the files.
      labels: Names of the labels by index.
      identity: Other JSON values for the digest.
    """
    encoded = {split: encode(split, examples) for split, examples in splits.items()}
    contents = {split: [content(each) for each in examples] for split, examples in splits.items()}
    digest = cache_key(tokenizer.digest, {**identity, **contents})
    return ExampleCorpus(tokenizer, encoded, digest, tuple(labels), tuple(splits.notes))


def check_text_pair(location: str, pair: Any) -> tuple[str, str]:
    """Return a pair of texts. Raises UserError for anything else."""
    if isinstance(pair, tuple | list) and [type(each) for each in pair] == [str, str]:
        return pair[0], pair[1]
    raise UserError(f"{location}: is not a pair of texts; yield tuples of two strings")


def choose_held_out_examples(count: int, fraction: float, seed: int) -> frozenset[int]:
    """Choose a fraction of the indices below ``count``: at least one, and not all.

    They are chosen in the order of a hash, which is the same on every machine.
    """

    def order(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()

    num_chosen = min(max(1, round(count * fraction)), count - 1)
    return frozenset(sorted(range(count), key=order)[:num_chosen])


def tokenizer_for_splits(config: TokenizerConfig, texts: Mapping[str, Iterable[str]]) -> Tokenizer:
    """Return the configured tokenizer, trained on the texts of the training split."""
    # A character tokenizer rejects unknown characters: its alphabet is that of all splits.
    names = texts if config.kind == "character" else ("train",)
    return train_tokenizer(config, itertools.chain.from_iterable(texts[name] for name in names))


def tokenize_examples(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the tokens [T] int32 of each text with a leading space, and show progress.

    The space gives the first word the token that it has elsewhere.
    """
    spaced = [f" {text.strip()}" for text in texts]
    with stage("tokenizing", total=sum(map(len, spaced))) as progress:
        yield from tokenizer.encode_documents(spaced, progress.advance)


def label_indices(
    labels: Iterable[tuple[str, str]], label_names: Sequence[str], noun: str
) -> list[int]:
    """Return the index of each label, given with its location.

    Raises:
      UserError: A label is not among ``label_names``; it is called a `noun`.
    """
    index_of = {name: index for index, name in enumerate(label_names)}
    indices = []
    for label, location in labels:
        if label not in index_of:
            raise UserError(
                f"{location}: {noun} {label!r} is not among those of the training split "
                f"({preview_names(label_names)}); correct it, or leave it out"
            )
        indices.append(index_of[label])
    return indices


def preview_names(names: Sequence[str]) -> str:
    """Return the first 20 names, for an error message."""
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


class Examples(Protocol):
    """Interface of a split of examples."""

    @property
    def lengths(self) -> np.ndarray:  # [n, sides]
        """Number of tokens of each side of each example."""
        ...

    def batch(
        self,
        indices: np.ndarray,  # [B] int64
        lengths: tuple[int, ...],
    ) -> HostBatch:
        """Return some examples, padded to these lengths. Index -1 gives a row of zeros."""
        ...


class ExampleTrainingBatches(TrainingBatches):
    """Endless training batches, each a pure function of the seed and the cursor.

    An epoch has every example once. The examples of each bucket are shuffled and dealt evenly to
    the fewest batches that hold them, and the batches of all buckets are shuffled. Unused rows are
    zeros. All epochs have the same number of batches, in different orders.

    Attributes:
      batches_per_epoch: Number of batches of an epoch.
    """

    def __init__(self, examples: Examples, buckets: Sequence[Bucket], *, seed: int):
        """Set up the batches of buckets that together have each example once."""
        self._examples, self._buckets, self._seed = examples, buckets, seed
        self._slices = batch_slices(buckets)
        self.batches_per_epoch = len(self._slices)

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        epoch, position = divmod(cursor, self.batches_per_epoch)
        batch = self._slices[
            seeded_permutation(self.batches_per_epoch, self._seed, epoch)[position]
        ]
        bucket = self._buckets[batch.bucket]
        order = seeded_permutation(len(bucket.examples), self._seed, epoch, 1 + batch.bucket)
        chosen = bucket.examples[order[batch.start : batch.stop]]
        return _rows(self._examples, bucket, chosen, host, num_hosts)


class ExampleEvaluationBatches:
    """Every example of a split once: bucket by bucket in order, the shortest bucket first."""

    def __init__(
        self, examples: Examples, buckets: Sequence[Bucket], *, max_batches: int | None = None
    ):
        """Set up the batches: at most `max_batches`, spread evenly over all; None or 0: all."""
        self._examples, self._buckets = examples, buckets
        slices = batch_slices(buckets)
        count = min(len(slices), max_batches or len(slices))
        self._slices = [slices[index * len(slices) // count] for index in range(count)]

    def __len__(self) -> int:
        return len(self._slices)

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """Return the rows of batch ``cursor`` of one host. Unused rows have weight 0."""
        batch = self._slices[cursor]
        bucket = self._buckets[batch.bucket]
        chosen = bucket.examples[batch.start : batch.stop]
        return _rows(self._examples, bucket, chosen, host, num_hosts)


class BatchSlice(NamedTuple):
    """Examples of one batch: those of a bucket from ``start`` up to ``stop``."""

    bucket: int
    start: int
    stop: int


def batch_slices(buckets: Sequence[Bucket]) -> list[BatchSlice]:
    """Deal the examples of each bucket evenly to the fewest batches that hold them."""
    slices = []
    for index, bucket in enumerate(buckets):
        count = len(bucket.examples)
        num_batches = -(-count // bucket.batch_size)
        cuts = [batch * count // num_batches for batch in range(num_batches + 1)]
        slices += [BatchSlice(index, *cut) for cut in itertools.pairwise(cuts)]
    return slices


def _rows(
    examples: Examples,
    bucket: Bucket,
    chosen: np.ndarray,  # [at most rows] int64
    host: int,
    num_hosts: int,
) -> HostBatch:
    """Return one host's rows of a batch. Rows without an example get index -1, and weight 0."""
    indices = np.full(bucket.batch_size, -1)
    indices[: len(chosen)] = chosen
    rows = slice(*host_rows(bucket.batch_size, host, num_hosts))
    return examples.batch(indices[rows], bucket.lengths)
