"""User datasets, which yield examples instead of reading files."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from train.data.corpus import prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.text_labels import ClassificationDataConfig, prepare_classification
from train.data.token_labels import TokenLabelDataConfig, prepare_token_labels
from train.errors import UserError

BYTES = TokenizerConfig("byte")


class Own:
    """Dataset whose splits are the entries of a dict."""

    splits: dict[str, Any] = {}  # noqa: RUF012

    def read_split(self, split: str) -> Iterable[Any] | None:
        return self.splits.get(split)


@pytest.fixture(autouse=True)
def no_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "splits", {})


@dataclasses.dataclass(frozen=True)
class OwnTexts(Own, TextDataConfig):
    pass


@dataclasses.dataclass(frozen=True)
class OwnLabels(Own, ClassificationDataConfig):
    pass


@dataclasses.dataclass(frozen=True)
class OwnTags(Own, TokenLabelDataConfig):
    pass


def test_texts(tmp_path: Path) -> None:
    Own.splits = {"train": ["one", "", "two"], "validation": ["three"], "test": ["four"]}
    config = OwnTexts(tokenizer=BYTES, cache_dir=str(tmp_path))
    corpus = prepare_text(config)
    assert list(corpus.streams) == ["train", "validation", "test"]
    decode = corpus.tokenizer.decode
    assert {name: decode(corpus.split(name).tokens[1:-1]) for name in corpus.streams} == {
        "train": "onetwo",
        "validation": "three",
        "test": "four",
    }
    assert prepare_text(config).digest == corpus.digest
    Own.splits["test"] = ["five"]
    assert prepare_text(config).digest != corpus.digest


def test_labels() -> None:
    Own.splits = {
        "train": [("red fish", "a"), ["blue", "b"], ("x", "a")],
        "validation": [("old", "b")],
    }
    corpus = prepare_classification(OwnLabels(tokenizer=BYTES))
    assert corpus.labels == ("a", "b")
    assert corpus.split("train").texts == ["red fish", "blue", "x"]
    assert corpus.split("validation").targets.tolist() == [1]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, "dataset OwnLabels: has no split train"),
        ([], "dataset OwnLabels, split train: has no examples"),
        (["ab"], "split train, example 0: is not a pair of texts"),
        ([("a", "b"), ("a", 1)], "split train, example 1: is not a pair of texts"),
    ],
)
def test_wrong_examples(train: Any, message: str) -> None:
    Own.splits = {} if train is None else {"train": train}
    with pytest.raises(UserError, match=message):
        prepare_classification(OwnLabels(tokenizer=BYTES))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (None, "split train: is empty"),
        ([""], "split train: is empty"),
        (["a", 3], "split train, example 1: is a int"),
    ],
)
def test_wrong_texts(tmp_path: Path, train: Any, message: str) -> None:
    Own.splits = {} if train is None else {"train": train}
    with pytest.raises(UserError, match=message):
        prepare_text(OwnTexts(tokenizer=BYTES, cache_dir=str(tmp_path)))


def test_sentences_without_words() -> None:
    Own.splits = {"train": [[("a", "N")], []]}
    with pytest.raises(UserError, match="split train, example 1: has no words; leave it out"):
        prepare_token_labels(OwnTags(tokenizer=BYTES))
