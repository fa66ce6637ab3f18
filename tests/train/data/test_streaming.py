"""Streams: the order of documents, windows against one long token stream, and exact positions."""

import dataclasses
import gzip
import json
import re
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.data import formats
from train.data import streaming
from train.data.batches import TrainingBatches, host_rows
from train.data.corpus import prepare_text
from train.data.data_config import SourceConfig, StreamingConfig, TextDataConfig, TokenizerConfig
from train.data.mixed_corpora import prepare_any_text
from train.data.streaming import (
    StreamedText,
    StreamedTrainingBatches,
    StreamPosition,
    StreamReader,
)
from train.data.token_file import HostBatch, Windows
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError

TOKENIZER = train_tokenizer(TokenizerConfig("byte"), ())
LENGTH = 8


def text_of(number: int) -> str:
    return f"<{number}>" + "x" * (number * 7 % 19)


def records(numbers: range) -> list[dict[str, Any]]:
    return [{"text": text_of(number)} for number in numbers]


WRITERS: dict[str, formats.Write] = {
    ".jsonl": formats.json_lines,
    ".jsonl.gz": lambda rows: gzip.compress(formats.json_lines(rows)),
    ".jsonl.zst": lambda rows: formats.zstd(formats.json_lines(rows)),
    ".parquet": formats.parquet,
    ".arrow": formats.arrow,
    ".csv": formats.cells,
    ".json": formats.json_array,
}


def write_files(folder: Path, *, files: int = 3, each: int = 20, ending: str = ".jsonl") -> str:
    folder.mkdir(exist_ok=True)
    for number in range(files):
        numbers = range(number * each, (number + 1) * each)
        (folder / f"part{number}{ending}").write_bytes(WRITERS[ending](records(numbers)))
    return str(folder)


def make_reader(path: str, **changes: Any) -> StreamReader:
    streaming = StreamingConfig(enabled=True, validation_documents=5)
    source = SourceConfig(path=path, validation_path=changes.pop("validation_path", "other"))
    text = StreamedText.find("data", "text", source, streaming)
    settings: dict[str, Any] = {
        "files": range(len(text.files)),
        "seeds": (3,),
        "shuffle_window": 6,
        "sequence_length": LENGTH,
        "document_masking": True,
        "max_epochs": 0,
    }
    return StreamReader(text, TOKENIZER, **{**settings, **changes})


def documents_in(reader: StreamReader, windows: int) -> list[int]:
    """Return the numbers of the documents in the next windows, in order."""
    tokens = reader.windows(windows)["tokens"].ravel()
    return [int(n) for n in re.findall(r"<(\d+)>", TOKENIZER.decode(tokens))]


@pytest.mark.parametrize("document_masking", [True, False])
def test_windows_match_one_long_stream(tmp_path: Path, document_masking: bool) -> None:
    path = write_files(tmp_path / "parts")
    reader = make_reader(path, shuffle_window=1, document_masking=document_masking)
    # The oracle: the same files, tokenized whole, cut from the start on.
    config = TextDataConfig(
        path=path,
        validation_path=path,
        tokenizer=TokenizerConfig("byte"),
        cache_dir=str(tmp_path / "cache"),
    )
    stream = prepare_text(config).streams["train"]
    count = stream.num_targets // LENGTH
    full = Windows(stream, LENGTH, document_masking=document_masking)
    expected = full.cut(np.arange(count) * LENGTH)
    for first, last in ((0, 1), (1, 5), (5, count)):
        result = reader.windows(last - first)
        for name, array in result.items():
            assert np.array_equal(array, expected[name][first:last]), name
            assert array.dtype == (np.float32 if name == "weights" else np.int32)


def test_every_epoch_has_each_document_once_in_a_new_order(tmp_path: Path) -> None:
    reader = make_reader(write_files(tmp_path / "parts"))
    actual = documents_in(reader, 250)
    assert len(actual) > 130
    epochs = [actual[start : start + 60] for start in (0, 60)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(60))
        # With a shuffle window of six, no document moves further than that.
        for file in range(3):
            own = [n for n in epoch if n // 20 == file]
            assert max(abs(n % 20 - place) for place, n in enumerate(own)) <= 6
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
    assert documents_in(make_reader(write_files(tmp_path / "parts")), 250) == actual


@pytest.mark.parametrize("ending", WRITERS)
def test_resume_from_any_position_is_exact(tmp_path: Path, ending: str) -> None:
    path = write_files(tmp_path / "parts", ending=ending)
    reader = make_reader(path)
    as_json_lines = make_reader(write_files(tmp_path / "others")).windows(30)
    positions, windows = [], []
    for _ in range(130):  # more than one epoch
        positions.append(reader.position)
        windows.append(reader.windows(1))
    assert len(set(positions)) == 130
    assert positions[-1].epoch == 1
    for name, array in as_json_lines.items():
        assert np.array_equal(array, np.concatenate([window[name] for window in windows[:30]]))
    for at in range(0, 120, 3):
        resumed = make_reader(path)
        resumed.seek(StreamPosition(*json.loads(json.dumps(positions[at]))))
        assert resumed.position == positions[at]
        later = resumed.windows(10)
        for name, array in later.items():
            expected = np.concatenate([window[name] for window in windows[at : at + 10]])
            # Windows cut one at a time number their documents the same way.
            assert np.array_equal(array, expected), (at, name)


def config_of(folder: Path, **streaming: Any) -> TextDataConfig:
    settings = {"enabled": True, "shuffle_window": 6, "validation_documents": 5, **streaming}
    return TextDataConfig(
        sources=(
            SourceConfig(path=write_files(folder / "one", files=4), weight=2),
            SourceConfig(path=write_files(folder / "two", files=5), weight=1),
        ),
        streaming=StreamingConfig(**settings),
        sequence_length=LENGTH,
        tokenizer=TokenizerConfig("byte"),
        cache_dir=str(folder / "cache"),
    )


def make_batches(config: TextDataConfig, batch_size: int = 12) -> TrainingBatches:
    corpus: Any = prepare_any_text(config)
    batches: TrainingBatches = corpus.training_batches(
        config, batch_size=batch_size, seed=1, steps=100
    )
    return batches


def assert_same(one: HostBatch, other: HostBatch) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype
        assert np.array_equal(array, other[name]), name


@pytest.mark.parametrize("readers", [1, 4])
def test_batches_are_the_same_for_any_number_of_hosts(tmp_path: Path, readers: int) -> None:
    config = config_of(tmp_path, readers=readers)
    expected = [make_batches(config).host_batch(cursor, 0, 1) for cursor in range(4)]
    for num_hosts in (3, 4):
        hosts = [make_batches(config) for _ in range(num_hosts)]
        for cursor, whole in enumerate(expected):
            parts = [each.host_batch(cursor, n, num_hosts) for n, each in enumerate(hosts)]
            joined = {name: np.concatenate([part[name] for part in parts]) for name in whole}
            assert_same(joined, whole)


def test_hosts_read_only_the_files_of_their_rows(tmp_path: Path) -> None:
    config = config_of(tmp_path, readers=4)
    batches = make_batches(config)
    assert isinstance(batches, StreamedTrainingBatches)
    batches.host_batch(0, 1, 4)
    start = [[StreamPosition()] * 2 for _ in range(4)]
    positions = [group.position(1)[1] for group in batches._groups]
    assert [own != first for own, first in zip(positions, start, strict=True)] == [0, 1, 0, 0]
    assert batches._groups[1].readers[0]._files.tolist() == [1]


def test_batches_continue_from_a_saved_position_and_from_any_cursor(tmp_path: Path) -> None:
    config = config_of(tmp_path, readers=2)
    batches = make_batches(config)
    expected = [batches.host_batch(cursor, 0, 1) for cursor in range(30)]
    saved = json.loads(json.dumps(batches.position(20)))
    assert all(row[0] == 20 for row in saved)
    resumed = make_batches(config)
    resumed.seek(saved)
    reads: Counter[str] = Counter()
    original = StreamReader.windows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            StreamReader,
            "windows",
            lambda self, count: (reads.update(["read"]), original(self, count))[1],
        )
        assert_same(resumed.host_batch(20, 0, 1), expected[20])
    assert reads["read"] <= 4  # one batch of two sources and two readers: nothing before it
    assert_same(resumed.host_batch(25, 0, 1), expected[25])  # batches skipped after a rollback
    assert_same(resumed.host_batch(22, 0, 1), expected[22])  # and back
    assert_same(batches.host_batch(3, 0, 1), expected[3])
    batches.seek(None)
    assert_same(batches.host_batch(0, 0, 1), expected[0])


def test_position_of_several_processes_resumes_with_another_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four hosts read ten batches; one host continues, and two."""
    config = config_of(tmp_path, readers=4)
    full = make_batches(config)
    expected = [full.host_batch(cursor, 0, 1) for cursor in range(14)]
    hosts = [make_batches(config) for _ in range(4)]
    for cursor in range(10):
        for number, each in enumerate(hosts):
            each.host_batch(cursor, number, 4)
    own: list[np.ndarray] = []
    monkeypatch.setattr("jax.process_count", lambda: 4)
    gather = "jax.experimental.multihost_utils.process_allgather"

    def alone(array: np.ndarray) -> np.ndarray:
        own.append(array)
        return array[None]

    monkeypatch.setattr(gather, alone)
    for each in hosts:
        each.position(10)
    assert all(array.dtype == np.int32 for array in own)  # JAX would cut 64 bits to 32
    monkeypatch.setattr(gather, lambda array: np.stack(own))
    saved = hosts[0].position(10)
    for num_hosts in (1, 2):
        resumed = [make_batches(config) for _ in range(num_hosts)]
        for number, each in enumerate(resumed):
            each.seek(saved)
            start, stop = host_rows(12, number, num_hosts)
            actual = each.host_batch(12, number, num_hosts)
            assert_same(actual, {name: a[start:stop] for name, a in expected[12].items()})


def test_batches_whose_positions_are_forgotten_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward from the nearest position that is kept, or from the start of the data."""
    monkeypatch.setattr(streaming, "KEPT_POSITIONS", 3)
    config = config_of(tmp_path, readers=2)
    batches = make_batches(config)
    expected = [batches.host_batch(cursor, 0, 1) for cursor in range(10)]
    for cursor in (9, 8, 2, 2, 7):
        assert_same(batches.host_batch(cursor, 0, 1), expected[cursor])
    # The positions before batches 6 to 8 are those that are kept.
    assert [row[0] for row in batches.position(7)] == [7, 7]
    assert [row[0] for row in batches.position(1)] == [0, 0]
    resumed = make_batches(config)
    resumed.seek(batches.position(1))
    assert_same(resumed.host_batch(1, 0, 1), expected[1])


@pytest.mark.parametrize("readers", [1, 4])
def test_realized_shares_are_counted(tmp_path: Path, readers: int) -> None:
    config = config_of(tmp_path, readers=readers)
    # Every window of the second source has a y, and none of the first.
    for file in (tmp_path / "two").iterdir():
        file.write_bytes(formats.json_lines([{"text": "y" * 40}] * 20))
    batches = make_batches(config)
    tokens = np.concatenate([batches.host_batch(c, 0, 1)["tokens"] for c in range(7)])
    second = float(np.mean((tokens == ord("y")).any(axis=1)))
    assert 0.25 < second < 0.42
    assert batches.source_shares(7) == pytest.approx({"one": 1 - second, "two": second})
    assert batches.source_shares(0) == {"one": 0, "two": 0}


def test_stream_is_never_fully_in_memory_or_on_disk(tmp_path: Path) -> None:
    line = json.dumps({"text": "word " * 400}) + "\n"  # 2 kB
    with (tmp_path / "large.jsonl").open("w") as file:
        for _ in range(10):
            file.write(line * 1000)  # 20 MB
    config = TextDataConfig(
        path=str(tmp_path / "large.jsonl"),
        streaming=StreamingConfig(enabled=True, shuffle_window=32, validation_documents=10),
        sequence_length=512,
        tokenizer=TokenizerConfig("byte"),
        cache_dir=str(tmp_path / "cache"),
    )
    batches = make_batches(config, batch_size=64)
    batches.host_batch(0, 0, 1)
    tracemalloc.start()
    try:
        for cursor in range(1, 40):  # 1.3 MB of text
            batches.host_batch(cursor, 0, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8e6
    on_disk = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.tokens"))
    assert on_disk < 2e5


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    reader = make_reader(write_files(tmp_path / "parts"), validation_path="")
    actual = documents_in(reader, 60)
    assert not set(actual) & {0, 1, 2, 3, 4}
    config = config_of(tmp_path)
    corpus: Any = prepare_any_text(config)
    held_out = corpus.streams["validation/one"]
    assert TOKENIZER.decode(held_out.tokens) == "".join(text_of(n) for n in range(5))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"body": "b"}'], r"a\.jsonl:2: has no field 'text' .*set data\.text_f"),
        (['{"text": ""}', "", '{"text": ""}'], r"data text: has no text to train on"),
    ],
)
def test_text_that_is_missing_is_an_error(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=message):
        make_reader(str(tmp_path / "a.jsonl")).windows(1)


def test_held_out_text_of_streams_with_the_same_file_names(tmp_path: Path) -> None:
    """Each has its own entry of the cache; the digest, for a resume, names no place."""

    def prepare(folder: Path, text: str) -> Any:
        folder.mkdir(exist_ok=True)
        lines = [json.dumps({"text": f"{text} {number}"}) + "\n" for number in range(9)]
        (folder / "part-0.jsonl").write_text("".join(lines))
        config = TextDataConfig(
            path=str(folder),
            tokenizer=TokenizerConfig("byte"),
            cache_dir=str(tmp_path / "cache"),
            streaming=StreamingConfig(enabled=True, validation_documents=2),
        )
        return prepare_any_text(config)

    def validation(corpus: Any) -> str:
        text: str = corpus.tokenizer.decode(corpus.sources[0].corpus.split("validation").tokens)
        return text

    apples, melons = prepare(tmp_path / "web", "apple"), prepare(tmp_path / "books", "melon")
    assert (validation(apples), validation(melons)) == ("apple 0apple 1", "melon 0melon 1")
    assert prepare(tmp_path / "moved", "apple").digest == apples.digest != melons.digest
    assert validation(prepare(tmp_path / "web", "olive")) == "olive 0olive 1"


def test_source_is_exhausted_after_its_epochs(tmp_path: Path) -> None:
    reader = make_reader(write_files(tmp_path / "parts"), max_epochs=2)
    with pytest.raises(UserError, match="data text: is used up after 2 epochs; raise its max_ep"):
        reader.windows(1000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streaming": {"readers": 5}}, "data.streaming.readers 5: data.sources.0.path"),
        ({"streaming": {"readers": 4}, "batch_size": 6}, "readers 4: does not divide batch_size 6"),
        ({"tokenizer": TokenizerConfig("character")}, "kind character: needs all characters"),
        ({"max_bytes": 5}, "data.sources.0.max_bytes 5: is not supported"),
        ({"path": "python:library"}, "data.sources.0.path python:library: is not a file"),
        ({"path": "python:data/1"}, "data.sources.0.path python:data/1: is not a file"),
    ],
)
def test_unsupported_settings_raise(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = config_of(tmp_path, **changes.pop("streaming", {}))
    batch_size = changes.pop("batch_size", 12)
    tokenizer = changes.pop("tokenizer", config.tokenizer)
    first = dataclasses.replace(config.sources[0], **changes)
    config = dataclasses.replace(config, sources=(first, *config.sources[1:]), tokenizer=tokenizer)
    with pytest.raises(UserError, match=re.escape(message)):
        make_batches(config, batch_size)


def test_parquet_errors_name_the_column(tmp_path: Path) -> None:
    rows = [{"id": number, "text": "a"} for number in range(3)]
    (tmp_path / "a.parquet").write_bytes(formats.parquet(rows))
    for column, message in (
        ("body", r"has no field 'body' \(it has id, text\)"),
        ("id", r"field 'id' is not a text"),
    ):
        source = SourceConfig(path=str(tmp_path / "a.parquet"), text_field=column)
        text = StreamedText.find("data", "a", source, StreamingConfig(enabled=True))
        with pytest.raises(UserError, match=message):
            list(text.documents())
