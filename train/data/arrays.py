"""Examples as arrays that a task reads or generates itself: splits, and batches of their rows."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated

import numpy as np

from train.data.batches import TrainingBatches, example_ids, host_rows, seeded_permutation
from train.data.data_config import DataConfig
from train.data.examples import choose_held_out_examples
from train.data.files import SPLITS, split_of
from train.data.token_file import HostBatch
from train.errors import UserError
from transformer.validation import Mark, PositiveInt


@dataclasses.dataclass(frozen=True)
class ArrayDataConfig(DataConfig):
    """Arrays that the task reads or generates itself: no text and no tokenizer."""

    length_field = "length"

    path: Annotated[str, Mark.RESUMABLE, Mark.COMMON] = ""
    """File or folder, for a task that reads one."""

    length: Annotated[PositiveInt, Mark.COMMON] = 64
    """Positions of an example, T."""

    @property
    def longest_example(self) -> int:
        return self.length

    @property
    def has_segments(self) -> bool:
        return False


Arrays = Mapping[str, np.ndarray]
"""Arrays by name. All have one row for each example."""

HELD_OUT_FRACTION = 0.1
"""Fraction of the training examples to validate on, if there is no such split."""


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayCorpus:
    """Arrays of all splits, in memory. There is no tokenizer."""

    splits: Mapping[str, Arrays]
    digest: str
    """Digest of names, shapes and values: equal for equal data."""
    tokenizer: None = None
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def split(self, name: str) -> Arrays:
        """Return the arrays of a split. Raises UserError if there is none of that name."""
        return split_of(self.splits, name)


def prepare_arrays(read: Callable[[str], Arrays | None]) -> ArrayCorpus:
    """Read every split. Without a validation split, a tenth of the training examples is held out.

    Raises:
      UserError: A split is empty, or its arrays differ in length, or in names from the others.
    """
    splits_read = {name: arrays for name in SPLITS if (arrays := read(name)) is not None}
    if "train" not in splits_read:
        raise UserError(
            "the train split: there is none; return its arrays from read_arrays, or give them to "
            "train.fit as data"
        )
    splits = {name: check_arrays(name, arrays) for name, arrays in splits_read.items()}
    for name, arrays in splits.items():
        # Else an evaluation would stop the training, in the middle, with a KeyError of the loss.
        if missing := splits["train"].keys() - arrays.keys() - {"weights"}:
            raise UserError(
                f"the {name} split: has no array {min(missing)}, which the train split has; add it"
            )
    if "validation" not in splits:
        count = num_examples(splits["train"])
        if count < 2:
            raise UserError(
                "the train split: a single example leaves none to hold out for validation; give "
                "more"
            )
        chosen = np.zeros(count, bool)
        chosen[list(choose_held_out_examples(count, HELD_OUT_FRACTION, seed=0))] = True
        all_examples = splits["train"]
        splits["train"] = {key: array[~chosen] for key, array in all_examples.items()}
        splits["validation"] = {key: array[chosen] for key, array in all_examples.items()}
    ordered = {name: splits[name] for name in SPLITS if name in splits}
    return ArrayCorpus(ordered, digest_arrays(ordered))


def digest_arrays(splits: Mapping[str, Arrays]) -> str:
    """Return a digest of arrays: of names, dtypes and shapes too, as equal bytes may differ."""
    digest = hashlib.blake2b(digest_size=16)
    for name, arrays in sorted(splits.items()):
        for key, array in sorted(arrays.items()):
            digest.update(f"{name} {key} {array.dtype} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def check_arrays(split: str, arrays: Arrays) -> dict[str, np.ndarray]:
    """Return the arrays of a split in the 32-bit types of the devices.

    Raises:
      UserError: There are no examples, or the arrays differ in length, or a number has no place.
    """
    converted = {name: _to_32_bits(split, name, np.asarray(x)) for name, x in arrays.items()}
    lengths = {name: len(array) if array.ndim else 0 for name, array in converted.items()}
    if not lengths or 0 in lengths.values():
        raise UserError(f"the {split} split: has no examples; give arrays with a row for each")
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(
            f"the {split} split: its arrays differ in length ({sizes}); give one row for each "
            "example in all of them"
        )
    if "examples" in converted:
        raise UserError(f"the {split} split: `examples` numbers the rows; rename that array")
    return converted


def _to_32_bits(split: str, name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind not in "fiub":
        raise UserError(
            f"the {split} split: array {name} is of {array.dtype}; give numbers or booleans"
        )
    # NumPy's defaults have 64 bits, which JAX would cut to 32 without an error.
    if array.dtype.itemsize <= 4:
        return array
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    bounds = np.iinfo(np.int32)
    if array.size and (array.min() < bounds.min or array.max() > bounds.max):
        raise UserError(f"the {split} split: array {name} has numbers beyond int32; lower them")
    return array.astype(np.int32)


def num_examples(arrays: Arrays) -> int:
    """Return the number of examples of a split."""
    return len(next(iter(arrays.values())))


def take_rows(
    arrays: Arrays,
    indices: np.ndarray,  # [B] int64; -1: an empty row
) -> HostBatch:
    """Return a batch: the arrays' rows, with `examples` [B] and the `weights` of the targets.

    Weights are 1, or the array `weights` of the data, and 0 in an empty row, which repeats the last
    example.
    """
    batch = {name: array[indices] for name, array in arrays.items()}
    weights = np.array(batch.get("weights", np.ones(len(indices))), np.float32)
    weights[indices < 0] = 0
    return {**batch, "weights": weights, "examples": example_ids(np.maximum(indices, 0))}


@dataclasses.dataclass(frozen=True)
class ArrayTrainingBatches(TrainingBatches):
    """Endless batches of shuffled rows, each a pure function of the seed and the cursor.

    Every epoch has every example once, in an order of its own; a batch may span two epochs.
    """

    one_shape = True

    arrays: Arrays
    batch_size: int
    seed: int

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """Return the rows of batch ``cursor`` that belong to one host."""
        count = num_examples(self.arrays)
        start, stop = host_rows(self.batch_size, host, num_hosts)
        numbers = cursor * self.batch_size + np.arange(start, stop)
        # Counted over all epochs: no batch is cut short at the end of one, and the cursor alone
        # says which rows come next.
        epochs, places = np.divmod(numbers, count)
        indices = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            indices[rows] = seeded_permutation(count, self.seed, int(epoch))[places[rows]]
        return take_rows(self.arrays, indices)


@dataclasses.dataclass(frozen=True)
class ArrayEvaluationBatches:
    """Every row of a split once, in order; the last batch is filled with empty rows."""

    arrays: Arrays
    batch_size: int
    max_batches: int | None = None
    """Maximum number of batches, from the start. None: all."""

    def __len__(self) -> int:
        count = -(-num_examples(self.arrays) // self.batch_size)
        return min(count, self.max_batches or count)

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """Return the rows of batch ``cursor`` that belong to one host."""
        start, stop = host_rows(self.batch_size, host, num_hosts)
        indices = cursor * self.batch_size + np.arange(start, stop)
        return take_rows(self.arrays, np.where(indices < num_examples(self.arrays), indices, -1))
