"""Mixtures of sources: shares by the formula, and the rows of every source."""

import dataclasses
import itertools
import json
import re
from fractions import Fraction
from math import floor, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.data.conftest import MakeStream
from train.data.batches import TextTrainingBatches
from train.data.data_config import SourceConfig, TextDataConfig, TokenizerConfig
from train.data.mixed_corpora import (
    MixedCorpus,
    combine_metrics,
    interleave_documents,
    prepare_any_text,
)
from train.data.source_mixing import (
    BLOCK_EXAMPLES,
    MixedTrainingBatches,
    MixtureSchedule,
)
from train.data.text_files import Document
from train.errors import UserError


def expected_counts(weights: list[float], block: int) -> list[int]:
    """Return the counts of the docstring's formula, in exact fractions."""
    exact = [Fraction(str(weight)) for weight in weights]
    bounds = [sum(exact[:k]) / sum(exact) * block * BLOCK_EXAMPLES for k in range(len(exact) + 1)]
    ends = [floor(each + Fraction(1, 2)) for each in bounds]
    return [end - start for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [3, 1], [1], [1, 1e-4, 2.5, 7]])
def test_shares_match_formula(weights: list[float]) -> None:
    schedule = MixtureSchedule(weights, 5)
    for block in (1, 2, 7):
        sources, _ = schedule.draw(np.arange(block * BLOCK_EXAMPLES))
        counts = np.bincount(sources, minlength=len(weights)).tolist()
        assert counts == expected_counts(weights, block)
        shares = np.array(weights) / sum(weights)
        assert np.abs(np.array(counts) - shares * block * BLOCK_EXAMPLES).max() < 1
    far = 10**9  # counts at a far block need no random draws
    assert schedule.examples_before_block(far).tolist() == expected_counts(weights, far)


def test_each_source_is_numbered_without_gaps() -> None:
    schedule = MixtureSchedule([0.6, 0.3, 0.1], 0)
    sources, indices = schedule.draw(np.arange(3 * BLOCK_EXAMPLES - 5))
    for source in range(3):
        drawn = indices[sources == source]
        assert drawn.tolist() == list(range(len(drawn)))
    # Any later part can be drawn on its own, and so can the count before it.
    start = BLOCK_EXAMPLES + 17
    later = schedule.draw(np.arange(start, start + 9))
    assert np.array_equal(later, [sources[start : start + 9], indices[start : start + 9]])
    assert schedule.examples_before(start).tolist() == np.bincount(sources[:start]).tolist()


def test_order_within_a_block_depends_on_the_seed_and_the_block() -> None:
    def drawn(seed: int, block: int) -> tuple[int, ...]:
        examples = np.arange(block * BLOCK_EXAMPLES, (block + 1) * BLOCK_EXAMPLES)
        return tuple(MixtureSchedule([1, 1], seed).draw(examples)[0].tolist())

    assert len({drawn(0, 0), drawn(1, 0), drawn(0, 1)}) == 3
    assert drawn(0, 1) == drawn(0, 1)


def make_mixture(make_stream: MakeStream, **changes: Any) -> MixedTrainingBatches:
    sources = {
        name: TextTrainingBatches(
            make_stream(list(range(first, first + 40))),
            batch_size=6,
            sequence_length=4,
            seed=seed,
            document_masking=True,
        )
        for seed, (name, first) in enumerate({"low": 1, "high": 101}.items())
    }
    settings = {"batch_size": 6, "max_examples": 600, "max_epochs": [0, 0], **changes}
    return MixedTrainingBatches(sources, MixtureSchedule([2, 1], 3), **settings)


def test_rows_are_the_windows_of_their_sources(make_stream: MakeStream) -> None:
    batches = make_mixture(make_stream)
    schedule = MixtureSchedule([2, 1], 3)
    for cursor in (0, 1, 40):
        batch = batches.host_batch(cursor, 0, 1)
        examples = np.arange(6 * cursor, 6 * cursor + 6)
        assert batch["examples"].tolist() == examples.tolist()
        for row, (source, index) in enumerate(zip(*schedule.draw(examples), strict=True)):
            windows = list(batches._sources.values())[source]
            own = windows.examples(np.array([index]))
            for name in ("tokens", "targets", "segments", "positions", "weights"):
                assert np.array_equal(batch[name][row], own[name][0]), name
                assert batch[name].dtype == own[name].dtype


def test_hosts_share_the_rows_of_a_batch(make_stream: MakeStream) -> None:
    batches = make_mixture(make_stream)
    full = batches.host_batch(7, 0, 1)
    parts = [batches.host_batch(7, host, 3) for host in range(3)]
    for name, array in full.items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), array)


def test_realized_shares_are_counted(make_stream: MakeStream) -> None:
    batches = make_mixture(make_stream)
    tokens = np.concatenate([batches.host_batch(c, 0, 1)["tokens"] for c in range(11)])
    high = float(np.mean(tokens.max(axis=1) > 100))
    assert batches.source_shares(11) == pytest.approx({"low": 1 - high, "high": high})
    assert batches.source_shares(0) == {"low": 0, "high": 0}


def test_exhausted_source_raises_before_training(make_stream: MakeStream) -> None:
    # 41 targets give ten windows of four.
    needed = MixtureSchedule([2, 1], 3).examples_before(600)[1]
    passes = -(-int(needed) // 10)
    make_mixture(make_stream, max_epochs=[0, passes])
    problem = rf"sources\.1 high: is too small, .* reads {needed} .* {passes - 1} epochs"
    with pytest.raises(UserError, match=problem):
        make_mixture(make_stream, max_epochs=[0, passes - 1])


def write_lines(path: Path, texts: list[str], field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def two_sources(folder: Path, **changes: Any) -> TextDataConfig:
    wiki = write_lines(folder / "wiki.jsonl", [f"the cat sat {n} " * 9 for n in range(30)])
    code = write_lines(folder / "code.jsonl", [f"x = {n};" * 9 for n in range(30)], "content")
    config = TextDataConfig(
        sources=(
            SourceConfig(path=wiki, weight=3),
            SourceConfig(path=code, text_field="content", validation_path=code),
        ),
        sequence_length=16,
        tokenizer=TokenizerConfig("byte"),
        cache_dir=str(folder / "cache"),
    )
    return dataclasses.replace(config, **changes)


def test_corpus_has_the_splits_of_every_source(tmp_path: Path) -> None:
    corpus = prepare_any_text(two_sources(tmp_path))
    assert isinstance(corpus, MixedCorpus)
    assert list(corpus.streams) == [
        "train/wiki", "train/code", "validation/wiki", "validation/code",
    ]  # fmt: skip
    assert len(corpus.streams["train/wiki"].document_starts) == 27
    assert len(corpus.streams["train/code"].document_starts) == 30
    shares = {source.name: share for source, share in corpus.parts("train")}
    assert shares == {"wiki": 0.75, "code": 0.25}
    with pytest.raises(UserError, match="split 'test': the data have only"):
        corpus.parts("test")


def test_tokenizer_is_trained_on_all_sources(tmp_path: Path) -> None:
    config = two_sources(tmp_path, tokenizer=TokenizerConfig("character"))
    tokenizer = prepare_any_text(config).tokenizer
    assert tokenizer.decode(tokenizer.encode("cat = 1;")) == "cat = 1;"


def test_documents_for_the_tokenizer_follow_the_weights() -> None:
    """Always of the source that is furthest behind; one that ends leaves its share."""
    readers = {
        number: iter([Document(f"{name}{n}", "x" * size) for n in range(count)])
        for number, (name, size, count) in {0: ("a", 2, 4), 2: ("b", 3, 3)}.items()
    }
    names = [each.name for each in interleave_documents(readers, [2, 9, 1])]
    # Characters over weights: a 0, 1, 2, 3, 4 and b 0, 3, 6, 9.
    assert names == ["a0", "b0", "a1", "a2", "a3", "b1", "b2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "a.txt"}, "data.path a.txt: is ignored"),
        ({"max_bytes": 9}, "data.max_bytes 9: is ignored"),
        ({"text_field": "body"}, "data.text_field body: is ignored"),
        (
            {"sources": (SourceConfig(path="a/x.txt"), SourceConfig(path="b/x.jsonl"))},
            "data.sources.1.name: 'x' is already the name",
        ),
        ({"sources": (SourceConfig(),)}, "data.sources.0.path: is empty"),
        ({"sources": (SourceConfig(path="/no/such"),)}, "data.sources.0.path /no/such: does not"),
    ],
)
def test_invalid_sources_raise(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        prepare_any_text(two_sources(tmp_path, **changes))


def test_missing_field_names_the_setting_of_its_source(tmp_path: Path) -> None:
    config = two_sources(tmp_path)
    sources = (config.sources[0], dataclasses.replace(config.sources[1], text_field="text"))
    with pytest.raises(UserError, match=r"code\.jsonl:1: has no field 'text' .*sources\.1\.text_f"):
        prepare_any_text(dataclasses.replace(config, sources=sources))


def test_metrics_of_a_mixture_are_means_over_its_tokens() -> None:
    # 4 and 2 bytes a token: bits/byte = nats/token / (bytes/token * ln 2).
    metrics = {
        "wiki": {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": 2 / (4 * log(2))},
        "code": {"loss": 1.0, "perplexity": 2.7, "bits_per_byte": 1 / (2 * log(2))},
    }
    actual = combine_metrics(metrics, {"wiki": 0.75, "code": 0.25})
    loss = 0.75 * 2 + 0.25 * 1
    bytes_per_token = 0.75 * 4 + 0.25 * 2
    assert actual["loss"] == pytest.approx(loss)
    assert actual["perplexity"] == pytest.approx(np.exp(loss))
    assert actual["bits_per_byte"] == pytest.approx(loss / (bytes_per_token * log(2)))
    assert actual["loss/wiki"] == 2.0
    assert actual["bits_per_byte/code"] == metrics["code"]["bits_per_byte"]
    assert "perplexity/wiki" not in actual
