import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data.buckets import Bucket, bucket_by_rows, bucket_by_tokens
from train.data.data_config import TokenizerConfig
from train.data.examples import (
    BatchSlice,
    ExampleCorpus,
    ExampleDataConfig,
    ExampleEvaluationBatches,
    ExampleSplits,
    ExampleTrainingBatches,
    batch_slices,
    choose_held_out_examples,
    encode_splits,
    read_splits,
    tokenize_examples,
    tokenizer_for_splits,
)
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.errors import UserError


def read(**settings: Any) -> ExampleSplits[str]:
    """Return the lines of files, without those that are `null`."""
    return read_splits(
        ExampleDataConfig(**settings), lambda location, row: None if row == "null" else row
    )


def write_lines(path: Path, count: int) -> list[str]:
    """Write lines that contain their file and number."""
    lines = [f"{path.name}:{number}" for number in range(count)]
    path.write_text("\n".join(lines))
    return lines


def test_each_path_is_a_split(tmp_path: Path) -> None:
    lines = {name: write_lines(tmp_path / name, 20) for name in "abc"}
    paths = {name: str(tmp_path / name) for name in "abc"}
    splits = read(path=paths["a"], validation_path=paths["b"], test_path=paths["c"])
    assert splits == {"train": lines["a"], "validation": lines["b"], "test": lines["c"]}
    assert splits.all_training == lines["a"]
    assert splits.notes == []


def test_folder_with_splits_and_rows_that_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train-1", "train-2", "dev", "test"):
        rows = [f"{name}:{number}" if number != 2 else "null" for number in range(4)]
        (tmp_path / "data" / f"{name}.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "test.json").write_text('["null"]')
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    splits = read(path=str(tmp_path))
    assert splits == {
        "train": [f"train-{file}:{n}" for file in (1, 2) for n in (0, 1, 3)],
        "validation": ["dev:0", "dev:1", "dev:3"],
    }
    assert splits.notes[0] == (
        f"data.path {tmp_path}: is a data folder with files of train 2, validation 1, test 1 "
        "(README.md left out)"
    )
    assert splits.notes[1].endswith("rows that are left out, as a field is null: 4")


def test_held_out_examples_match_the_recorded_ones(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a", 20)
    splits = read(path=str(tmp_path / "a"), validation_fraction=0.25, split_seed=0)
    held_out = [lines[number] for number in (3, 7, 9, 11, 18)]
    assert list(splits) == ["train", "validation"]
    assert splits == {
        "train": [line for line in lines if line not in held_out],
        "validation": held_out,
    }
    assert splits.all_training == [*splits["train"], *held_out]
    assert choose_held_out_examples(20, 0.25, 1) != {3, 7, 9, 11, 18}


@pytest.mark.parametrize(("fraction", "drawn"), [(0.01, 1), (0.5, 2), (0.99, 2)])
def test_number_of_held_out_examples(fraction: float, drawn: int) -> None:
    assert len(choose_held_out_examples(3, fraction, 0)) == drawn


def test_single_example_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    with pytest.raises(UserError, match=r"data\.path .*/a: a single .* set data\.validation_path"):
        read(path=str(tmp_path / "a"))


def test_missing_split_is_an_error() -> None:
    tokenizer = tokenizer_for_splits(TokenizerConfig("byte"), {"train": []})
    corpus = ExampleCorpus(tokenizer, {"train": "x", "validation": "y"}, "")
    assert corpus.split("validation") == "y"
    for name, remedy in (("test", r"set data\.test_path"), ("dev", "choose one of these")):
        with pytest.raises(UserError, match=f"only train, validation; {remedy}"):
            corpus.split(name)


def test_tokenizer_is_trained_on_the_training_split() -> None:
    texts = {"train": ["one two two"], "validation": ["three"]}
    word = tokenizer_for_splits(TokenizerConfig("word"), texts)
    assert word.decode(word.encode("two three")) == "two <unk>"
    character = tokenizer_for_splits(TokenizerConfig("character"), texts)
    assert character.decode(character.encode("three")) == "three"


def test_digest_differs_by_corpus() -> None:
    byte = tokenizer_for_splits(TokenizerConfig("byte"), {"train": []})
    lower = tokenizer_for_splits(TokenizerConfig("byte", lowercase=True), {"train": []})

    def digest(tokenizer: Tokenizer, train: list[Any], test: list[Any]) -> str:
        splits: ExampleSplits[Any] = ExampleSplits({"train": train, "test": test})
        corpus = encode_splits(splits, tokenizer, lambda *_: None, content=lambda each: each)
        return corpus.digest

    digests = {
        digest(byte, ["a"], ["b"]),
        digest(byte, ["a", "b"], []),
        digest(lower, ["a"], ["b"]),
    }
    assert len(digests) == 3
    assert digest(byte, [("a",)], []) == digest(byte, [["a"]], [])


def test_word_has_the_same_token_at_every_position() -> None:
    byte = tokenizer_for_splits(TokenizerConfig("byte"), {"train": []})
    tokens = tokenize_examples(byte, ["a b ", "\tc"])
    assert [each.tolist() for each in tokens] == [list(b" a b"), list(b" c")]


@dataclasses.dataclass
class Numbers:
    """Examples that can be identified in a batch."""

    lengths: np.ndarray  # [n, 1]

    def batch(self, numbers: np.ndarray, lengths: tuple[int, ...]) -> HostBatch:
        return {"numbers": numbers, "shape": np.array([len(numbers), *lengths])}


def some(count: int, seed: int = 0) -> Numbers:
    return Numbers(np.random.default_rng(seed).integers(2, 30, (count, 1)))


def epoch(batches: ExampleTrainingBatches, number: int) -> list[list[int]]:
    first = number * batches.batches_per_epoch
    return [
        batches.host_batch(cursor, 0, 1)["numbers"].tolist()
        for cursor in range(first, first + batches.batches_per_epoch)
    ]


def test_batch_slices_have_similar_sizes() -> None:
    buckets = (Bucket(4, (3,), np.arange(10)), Bucket(5, (9,), np.arange(5)))
    assert batch_slices(buckets) == [
        BatchSlice(0, 0, 3),
        BatchSlice(0, 3, 6),
        BatchSlice(0, 6, 10),
        BatchSlice(1, 0, 5),
    ]


@pytest.mark.parametrize("row_multiple", [1, 4])
def test_each_epoch_has_every_example_once(row_multiple: int) -> None:
    examples = some(197)
    buckets = bucket_by_tokens(examples.lengths, batch_tokens=120, batch_size_multiple=row_multiple)
    batches = ExampleTrainingBatches(examples, buckets, seed=5)
    orders, shapes = set(), set()
    for number in range(4):
        visited: list[int] = []
        for cursor in range(batches.batches_per_epoch):
            batch = batches.host_batch(number * batches.batches_per_epoch + cursor, 0, 1)
            size, length = batch["shape"].tolist()
            held = batch["numbers"][batch["numbers"] >= 0]
            assert size % row_multiple == 0
            assert size * length <= 120
            assert examples.lengths[held].max() <= length
            shapes.add((size, length))
            visited += held.tolist()
        assert sorted(visited) == list(range(197))
        orders.add(tuple(visited))
    assert len(orders) == 4
    assert len(shapes) == 8


def test_hosts_share_a_batch() -> None:
    examples = some(101)
    buckets = bucket_by_tokens(examples.lengths, batch_tokens=140, batch_size_multiple=4)
    for batches in (
        ExampleTrainingBatches(examples, buckets, seed=1),
        ExampleEvaluationBatches(examples, buckets),
    ):
        for cursor in (0, 3, 7):
            parts = [batches.host_batch(cursor, host, 4)["numbers"] for host in range(4)]
            assert len({len(part) for part in parts}) == 1
            full = batches.host_batch(cursor, 0, 1)["numbers"]
            np.testing.assert_array_equal(np.concatenate(parts), full)


def test_evaluation_has_every_example_once_in_order() -> None:
    examples = some(83)
    buckets = bucket_by_rows(examples.lengths, batch_size=6, max_buckets=3)
    batches = ExampleEvaluationBatches(examples, buckets)
    visited = [
        int(number)
        for cursor in range(len(batches))
        for number in batches.host_batch(cursor, 0, 1)["numbers"]
        if number >= 0
    ]
    assert visited == np.concatenate([bucket.examples for bucket in buckets]).tolist()
    assert sorted(visited) == list(range(83))


def test_limited_evaluation_covers_all_buckets() -> None:
    examples = some(83)
    buckets = bucket_by_rows(examples.lengths, batch_size=6, max_buckets=3)
    counts = [
        len(ExampleEvaluationBatches(examples, buckets, max_batches=most)) for most in (None, 0, 99)
    ]
    assert len(set(counts)) == 1
    few = ExampleEvaluationBatches(examples, buckets, max_batches=5)
    assert len(few) == 5 < counts[0]
    lengths = {int(few.host_batch(cursor, 0, 1)["shape"][1]) for cursor in range(5)}
    assert lengths == {bucket.lengths[0] for bucket in buckets}


def test_order_matches_the_recorded_one() -> None:
    """A run resumed with a newer version must keep the order it started with."""
    examples = Numbers(np.array([3, 3, 9, 3, 9, 9, 9])[:, None])
    batches = ExampleTrainingBatches(
        examples, bucket_by_rows(examples.lengths, batch_size=2), seed=7
    )
    assert epoch(batches, 0) == [[4, 5], [1, -1], [2, 6], [3, 0]]
    assert batches.host_batch(10**6, 0, 1)["numbers"].tolist() == [5, 2]
