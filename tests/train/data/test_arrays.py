import dataclasses
from typing import Any

import numpy as np
import pytest

from train.data.arrays import (
    ArrayCorpus,
    ArrayDataConfig,
    ArrayEvaluationBatches,
    Arrays,
    ArrayTrainingBatches,
    prepare_arrays,
    take_rows,
)
from train.errors import UserError


def numbers(count: int, start: int = 0) -> Arrays:
    """Return examples that are identified by their value."""
    return {"numbers": np.arange(start, start + count, dtype=np.float64)}


def corpus(**splits: Arrays) -> ArrayCorpus:
    return prepare_arrays(splits.get)


def test_splits_in_32_bits() -> None:
    test = {"x": np.ones((1, 2)), "y": np.ones(1), "more": np.ones(1)}
    edges = np.array([-(2**31), 2, 2**31 - 1])
    result = corpus(train={"x": np.ones((3, 2)), "y": edges}, test=test)
    assert list(result.splits) == ["train", "validation", "test"]
    train = result.split("train")
    assert {name: (x.dtype.name, len(x)) for name, x in train.items()} == {
        "x": ("float32", 2),
        "y": ("int32", 2),
    }
    assert result.tokenizer is None
    with pytest.raises(UserError, match="split 'dev': the data have only train, validation, test"):
        result.split("dev")


def test_a_tenth_of_the_training_examples_is_held_out() -> None:
    result = corpus(train=numbers(40))
    train, held_out = (result.split(name)["numbers"] for name in ("train", "validation"))
    assert (len(train), len(held_out)) == (36, 4)
    assert sorted([*train, *held_out]) == list(range(40))
    given = corpus(train=numbers(40), validation=numbers(5))
    assert len(given.split("train")["numbers"]) == 40


def test_digest_depends_on_all_data() -> None:
    splits = {"train": numbers(4), "validation": numbers(2)}
    digest = corpus(**splits).digest
    assert corpus(**splits).digest == digest
    others = (
        {**splits, "validation": numbers(2, start=1)},
        {name: {"renamed": arrays["numbers"]} for name, arrays in splits.items()},
        {**splits, "train": {"numbers": np.arange(4)}},
        {**splits, "train": {"numbers": np.arange(4.0).reshape(4, 1)}},
        {**splits, "test": numbers(1)},
    )
    assert len({digest, *(corpus(**other).digest for other in others)}) == 6


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, "the train split: there is none"),
        ({}, "has no examples"),
        ({"x": np.ones((0, 3))}, "has no examples"),
        ({"x": np.float32(3)}, "has no examples"),
        ({"x": np.ones(3), "y": np.ones(2)}, r"differ in length \(x 3, y 2\)"),
        ({"x": np.array(["a", "b"])}, "array x is of <U1"),
        ({"x": np.array([1, 2**31])}, "beyond int32"),
        ({"x": np.array([1, -(2**31) - 1])}, "beyond int32"),
        ({"examples": np.ones(3)}, "rename that array"),
        ({"x": np.ones(1)}, "a single example"),
    ],
)
def test_invalid_arrays_raise(train: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_arrays({"train": train}.get)


def test_every_split_has_the_arrays_of_training() -> None:
    train = {"x": np.ones(3), "weights": np.ones(3)}
    assert corpus(train=train, validation={"x": np.ones(2)}) is not None
    with pytest.raises(UserError, match="the test split: has no array x"):
        corpus(train=train, test=numbers(2))


def test_training_batches_visit_every_example_once_an_epoch() -> None:
    batches = ArrayTrainingBatches(numbers(7), batch_size=3, seed=5)
    drawn = np.concatenate([batches.host_batch(cursor, 0, 1)["numbers"] for cursor in range(7)])
    epochs = drawn.reshape(3, 7)
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = dataclasses.replace(batches, seed=6).host_batch(0, 0, 1)
    assert tuple(other["numbers"]) != tuple(drawn[:3])
    for host in range(3):  # every host has its rows
        rows = batches.host_batch(1, host, 3)
        assert rows["numbers"] == drawn[3 + host]
        assert rows["examples"] == drawn[3 + host]
        assert rows["weights"] == 1


def test_evaluation_batches_fill_up_with_empty_rows() -> None:
    batches = ArrayEvaluationBatches(numbers(5), batch_size=4)
    assert len(batches) == 2
    last = batches.host_batch(1, 0, 1)
    assert last["weights"].tolist() == [1, 0, 0, 0]
    assert last["numbers"][0] == 4
    assert batches.host_batch(1, 1, 2)["weights"].tolist() == [0, 0]
    assert len(dataclasses.replace(batches, max_batches=1)) == 1


def test_weights_of_the_data_are_kept() -> None:
    arrays = {"numbers": np.arange(2), "weights": np.array([[1, 0.5], [0.25, 1]])}
    rows = take_rows(arrays, np.array([1, -1]))
    assert rows["weights"].tolist() == [[0.25, 1], [0, 0]]
    assert rows["weights"].dtype == np.float32
    assert arrays["weights"].tolist() == [[1, 0.5], [0.25, 1]]


def test_examples_have_the_length_of_the_settings_and_no_segments() -> None:
    data = ArrayDataConfig(length=7)
    assert (data.longest_example, data.has_segments, data.tokenizer) == (7, False, None)
