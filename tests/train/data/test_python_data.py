"""Data given from Python: what is accepted, how it is split and named, and errors."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data.bitext import BitextDataConfig, prepare_bitext
from train.data.corpus import TextCorpus, prepare_text
from train.data.data_config import DataConfig, TextDataConfig, TokenizerConfig
from train.data.held_data import PythonData
from train.data.listops import ListOpsDataConfig
from train.data.python_data import check_same_data, hold_data
from train.data.text_labels import ClassificationDataConfig, prepare_classification
from train.data.token_labels import TokenLabelDataConfig, prepare_token_labels
from train.errors import UserError

BYTES = TokenizerConfig("byte")
TEXTS = [f"text {index}" for index in range(10)]
ARRAYS = np.arange(40).reshape(8, 5) % 7


def hold(data: Any, config: DataConfig, validation_data: Any = None) -> tuple[Any, PythonData]:
    return hold_data(config, data, validation_data)


def text_corpus(data: Any, folder: Path, **settings: Any) -> TextCorpus:
    config = TextDataConfig(cache_dir=str(folder), sequence_length=8, **settings)
    named, held_data = hold(data, config)
    corpus = prepare_text(named)
    assert held_data is not None  # keep a reference until here
    return corpus


def test_texts(tmp_path: Path) -> None:
    corpus = text_corpus(TEXTS, tmp_path, tokenizer=BYTES)
    assert [len(corpus.split(name).document_starts) for name in ("train", "validation")] == [9, 1]
    kwargs = {"train": TEXTS, "validation": ["one"], "test": ["two"]}
    corpus = text_corpus(kwargs, tmp_path, tokenizer=BYTES)
    assert corpus.tokenizer.decode(corpus.split("test").tokens[1:-1]) == "two"
    assert len(corpus.split("train").document_starts) == 10


def test_path_is_a_digest_of_the_data() -> None:
    config = TextDataConfig(path="x", validation_path="y")
    named, _ = hold(TEXTS, config)
    assert (named.path[:12], named.validation_path) == ("python:data/", "")
    assert hold(tuple(TEXTS), config)[0] == named
    assert hold((text for text in TEXTS), config)[0] == named
    paths = {hold(data, config)[0].path for data in (TEXTS[1:], ["".join(TEXTS)], ARRAYS)}
    assert len({named.path, *paths}) == 4
    assert hold(TEXTS, config, TEXTS[:1])[0].path not in {named.path, *paths}


def test_data_live_as_long_as_they_are_referenced(tmp_path: Path) -> None:
    named, held_data = hold(["gone"], TextDataConfig(cache_dir=str(tmp_path), tokenizer=BYTES))
    assert named.read_split("train") == ["gone"]
    assert named.read_split("test") is None
    del held_data
    with pytest.raises(UserError, match=r"data.path python:data/\w+: names data given from Python"):
        prepare_text(named)


def test_token_arrays(tmp_path: Path) -> None:
    """Each row is a document; one more token than they have separates documents."""
    kwargs = {"train": ARRAYS, "validation": [[1, 2]]}
    corpus = text_corpus(kwargs, tmp_path)
    assert corpus.tokenizer.vocab_size == 8
    assert corpus.tokenizer.eos_token_id == 7
    tokens = corpus.split("train").tokens
    np.testing.assert_array_equal(tokens[:-1].reshape(8, 6)[:, 1:], ARRAYS)
    assert tokens[::6].tolist() == [7] * 9
    assert corpus.split("train").document_starts.tolist() == list(range(0, 48, 6))
    assert corpus.split("validation").tokens.tolist() == [7, 1, 2, 7]
    assert corpus.tokenizer.encode("5 0").tolist() == [5, 0]
    assert corpus.tokenizer.decode([5, 7, 0]) == "5 0"
    with pytest.raises(UserError, match=r"words that the tokenizer lacks \(7 x\); give some of"):
        corpus.tokenizer.encode("1 x 7")
    assert corpus.compressed_bits_per_byte("train") == {}


def test_token_arrays_are_held_out(tmp_path: Path) -> None:
    corpus = text_corpus(ARRAYS, tmp_path, validation_fraction=0.25)
    assert [len(stream.document_starts) for stream in corpus.streams.values()] == [6, 2]
    one = text_corpus(np.arange(20), tmp_path)  # one document: its end is held out
    assert one.split("validation").tokens.tolist() == [20, 18, 19, 20]
    tail = text_corpus([[1, 2], [3, 4, 0]], tmp_path, split_method="tail", validation_fraction=0.4)
    assert tail.split("train").tokens.tolist() == [5, 1, 2, 5, 3, 5]
    assert tail.split("validation").tokens.tolist() == [5, 4, 0, 5]
    with pytest.raises(UserError, match=r"1 tokens are too few to hold out 0.1 of them"):
        text_corpus([[3]], tmp_path)


def test_token_arrays_with_a_tokenizer(tmp_path: Path) -> None:
    ids = list(b"the cat")
    corpus = text_corpus([ids, [*ids, 256]], tmp_path, tokenizer=BYTES, validation_fraction=0.4)
    train, validation = corpus.split("train"), corpus.split("validation")
    assert corpus.tokenizer.decode(train.tokens[1:-1]) == "the cat"
    assert (train.num_bytes, validation.num_bytes) == (7, 7)
    assert train.tokens.tolist() == validation.tokens.tolist() == [256, *ids, 256]
    with pytest.raises(UserError, match="split train, example 1: has the token id 257, and the"):
        text_corpus([ids, [257]], tmp_path, tokenizer=BYTES)


def test_token_arrays_with_the_tokenizer_of_an_earlier_run(tmp_path: Path) -> None:
    first = text_corpus(ARRAYS, tmp_path).tokenizer
    config, held_data = hold([[7, 0], [1]], TextDataConfig(cache_dir=str(tmp_path)))
    assert held_data.has_token_arrays
    with pytest.raises(UserError, match=r"has the token id 7, .* for itself \(7 separates docum"):
        prepare_text(config, tokenizer=first)
    config, held_data = hold([[0, 7], [1]], TextDataConfig(cache_dir=str(tmp_path)))
    stream = prepare_text(config, tokenizer=first).split("train")  # the end, which is not repeated
    assert stream.tokens.tolist() in ([7, 0, 7], [7, 1, 7])
    assert held_data is not None


def test_labels_of_validation_examples_must_be_known() -> None:
    data = [("a", "x"), ("b", "y"), ("c", "x")]
    config, held_data = hold(data, ClassificationDataConfig(tokenizer=BYTES), [("d", "z")])
    with pytest.raises(UserError, match="label 'z' is not among those of the training split"):
        prepare_classification(config)
    assert held_data is not None


def test_labels() -> None:
    config, held_data = hold([("a b", 1), ("c", np.int64(0)), ["d", 1]], ClassificationDataConfig())
    corpus = prepare_classification(dataclasses.replace(config, tokenizer=BYTES))
    assert corpus.labels == ("0", "1")
    assert held_data.splits["train"][1] == ("c", "0")


def test_tags() -> None:
    data = [(["the", "fish"], ["D", "N"]), (("a",), ("D",)), (["x"], [3])]
    config, held_data = hold(data, TokenLabelDataConfig(tokenizer=BYTES), data[:1])
    corpus = prepare_token_labels(config)
    assert corpus.labels == ("3", "D", "N")
    assert corpus.split("validation").tags() == [["D", "N"]]
    assert held_data.splits["train"][0] == [("the", "D"), ("fish", "N")]


def test_pairs() -> None:
    config, held_data = hold([("a b", "c"), ("d", "e f")], BitextDataConfig(), [("a", "c")])
    corpus = prepare_bitext(dataclasses.replace(config, tokenizer=BYTES))
    assert corpus.split("train").pairs == held_data.splits["train"]


TEXT, LABEL, TAGS = TextDataConfig(), ClassificationDataConfig(), TokenLabelDataConfig()


@pytest.mark.parametrize(
    ("data", "config", "message"),
    [
        ("a text", TEXT, "split train: is a str"),
        (3, TEXT, "split train: is a int"),
        ([], TEXT, "split train: is empty"),
        (["", ""], TEXT, "split train: is empty"),
        (["a", None], TEXT, "example 1: is a NoneType"),
        ([{"text": "a"}], TEXT, "example 0: is a dict"),
        (["fine", "bad \ud800"], TEXT, "example 1: half a surrogate pair"),
        ([[1, 2, [3]], [1]], TEXT, "example 0: is a list"),
        ([[1, -2]], TEXT, "example 0: has the token id -2"),
        ([[1.5]], TEXT, "example 0: is a list"),
        (["a", [1]], TEXT, "data: mixes texts and arrays"),
        ({"validation": ["a"]}, TEXT, "data: has no split train"),
        ({"train": ["a"], "dev": ["a"]}, TEXT, "data: split 'dev' is not known"),
        (["a"], LABEL, "example 0: is a str"),
        ([("a", "b", "c")], LABEL, "example 0: is a tuple"),
        ([("a", 1.5)], LABEL, "example 0: its label is 1.5"),
        ([("a", "")], LABEL, "example 0: its label is ''"),
        ([(1, "a")], LABEL, "example 0: its text is a int"),
        ([("bad \ud800", 1), ("b", 0)], LABEL, "example 0: half a surrogate pair"),
        ([(["a"], [])], TAGS, "example 0: has no tag for each token"),
        ([("a", "b")], TAGS, "example 0: has no tag for each token"),
        ([([], [])], TAGS, "example 0: has no tokens"),
        ([("a", None)], BitextDataConfig(), "example 0: its target is a NoneType"),
        ([("a", "b")], ListOpsDataConfig(), "ListOpsDataConfig reads no examples from Python"),
    ],
)
def test_unsupported_data_raise(data: Any, config: DataConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        hold(data, config)


def test_two_validation_splits() -> None:
    with pytest.raises(UserError, match="validation_data: data has a validation split too"):
        hold({"train": ["a"], "validation": ["b"]}, TEXT, ["c"])


def test_resumed_run_needs_its_data() -> None:
    check_same_data("runs/x", "python:data/1", "python:data/1")
    check_same_data("runs/x", "a.txt", "b.txt")
    with pytest.raises(UserError, match=r"runs/x: its run was trained .* python:data/1, and"):
        check_same_data("runs/x", "python:data/1", "python:data/2")
    with pytest.raises(UserError, match=r"and now none are given; call train.fit with the same"):
        check_same_data("runs/x", "python:data/1", "a.txt")
