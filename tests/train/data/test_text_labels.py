import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data.data_config import TokenizerConfig
from train.data.examples import ExampleCorpus
from train.data.text_labels import (
    ClassificationDataConfig,
    ClassificationSplit,
    encode_texts,
    prepare_classification,
)
from train.errors import UserError

TRAIN = "text\tid\tlabel\ngood good film\t1\tpos\nbad\t2\tneg\n\nso good\t3\tpos\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "train.tsv").write_text(TRAIN)
    (tmp_path / "dev.tsv").write_text("text\tid\tlabel\na bad film\t4\tneg\n")
    return tmp_path


def prepared(
    folder: Path, labels: tuple[str, ...] | None = None, **settings: Any
) -> ExampleCorpus[ClassificationSplit]:
    defaults: dict[str, Any] = {
        "path": f"{folder}/train.tsv",
        "validation_path": f"{folder}/dev.tsv",
        "max_length": 8,
        "tokenizer": TokenizerConfig("wordpiece", vocab_size=100),
    }
    return prepare_classification(ClassificationDataConfig(**defaults | settings), labels=labels)


def test_batch_matches_hand_computed_values(files: Path) -> None:
    corpus = prepared(files)
    assert corpus.labels == ("neg", "pos")
    assert corpus.notes == ()
    split = corpus.split("train")
    assert split.texts == ["good good film", "bad", "so good"]
    start = corpus.tokenizer.cls_token_id
    assert start == 2  # [CLS]
    good, film, so = (corpus.tokenizer.encode(word).tolist() for word in ("good", "film", "so"))
    first, second = [start, *good, *good, *film], [start, *so, *good]
    assert split.lengths[[0, 2], 0].tolist() == [len(first), len(second)]
    length = len(first) + 1
    batch = split.batch(np.array([2, 0, -1]), (length,))
    assert batch["tokens"].tolist() == [
        second + [0] * (length - len(second)),
        [*first, 0],
        [0] * length,
    ]
    assert batch["segments"].tolist() == [
        [1] * len(second) + [0] * (length - len(second)),
        [1] * len(first) + [0],
        [0] * length,
    ]
    assert batch["targets"].tolist() == [1, 1, 0]
    assert batch["weights"].tolist() == [1, 1, 0]
    assert batch["examples"].tolist() == [2, 0, 0]
    types = [array.dtype.name for array in batch.values()]
    assert sorted(types) == ["float32", "int32", "int32", "int32", "uint32"]
    assert split.batch(np.array([1]), (length,))["targets"].tolist() == [0]


def test_columns_by_number(files: Path) -> None:
    full = [row.split("\t") for row in TRAIN.splitlines()[1:] if row]
    (files / "train.tsv").write_text("".join(f"{label}\t{text}\n" for text, _, label in full))
    (files / "dev.tsv").write_text("neg\ta bad film\n")
    corpus = prepared(files, header=False, label_column="0", text_column="1")
    assert corpus.split("train").texts == ["good good film", "bad", "so good"]
    assert corpus.split("train").targets.tolist() == [1, 0, 1]


def test_label_as_first_word(files: Path) -> None:
    """The format of TREC's question classes, which are in Latin-1."""
    questions = "DESC:manner How did it ?\nNUM:date When was für Elise ?\nDESC:def What is x ?\n"
    (files / "train.tsv").write_bytes(questions.encode("latin-1"))
    (files / "dev.tsv").write_text("NUM:other How tall ?\n")
    settings: Any = {"format": "label_first", "encoding": "latin-1"}
    coarse = prepared(files, coarse_labels=True, **settings)
    assert coarse.labels == ("DESC", "NUM")
    assert coarse.split("train").texts[1] == "When was für Elise ?"
    with pytest.raises(
        UserError, match=r"dev\.tsv:1: label 'NUM:other' is not among those .*correct it"
    ):
        prepared(files, **settings)
    with pytest.raises(UserError, match=r"train\.tsv:2: not UTF-8 .*data\.encoding"):
        prepared(files, format="label_first")


SST2: Any = {"header": False, "text_column": "0", "label_column": "1"}
TREC: Any = {"format": "label_first", "encoding": "latin-1", "coarse_labels": True}


@pytest.mark.parametrize("settings", [{}, SST2, TREC], ids=["default", "sst2", "trec"])
@pytest.mark.parametrize("names", ["id,label,text", "Sentiment,n,Review", "class,x,sentence"])
def test_names_of_columns_are_recognized(files: Path, settings: dict[str, Any], names: str) -> None:
    """Whatever the config says of files without names."""
    rows = [(number, f'a "text", für\n{number}', f"label {number % 2}") for number in range(6)]
    first, _, last = names.split(",")
    with (files / "own.csv").open("w", newline="", encoding="utf-8") as file:
        label_first = first != "id"
        cells = [(label, n, text) if label_first else (n, label, text) for n, text, label in rows]
        csv.writer(file).writerows([names.split(","), *cells])
    corpus = prepared(files, path=f"{files}/own.csv", validation_path="", **settings)
    assert corpus.labels == ("label 0", "label 1")
    assert sorted(corpus.split("train").texts)[0] == 'a "text", für\n0'
    usual = names == "id,label,text"
    note = f"{files}/own.csv: has its labels in {first!r}, texts in {last!r}"
    assert corpus.notes == (() if usual else (note,))


def test_long_text_is_truncated(files: Path) -> None:
    corpus = prepared(files, max_length=2)
    assert corpus.split("train").lengths.max() == 2
    assert corpus.notes[0].startswith("the train split: 2 of 3 texts are longer")


def test_labels_of_an_existing_run_are_kept(files: Path) -> None:
    corpus = prepared(files, labels=("pos", "none", "neg"))
    assert corpus.labels == ("pos", "none", "neg")
    assert corpus.split("train").targets.tolist() == [0, 2, 0]
    with pytest.raises(UserError, match=r"train\.tsv:3: label 'neg' .* training split \(pos\)"):
        prepared(files, labels=("pos",))


def test_end_of_text_replaces_a_missing_class_token(files: Path) -> None:
    tokenizer = prepared(files, tokenizer=TokenizerConfig("bpe", vocab_size=300)).tokenizer
    assert tokenizer.cls_token_id == tokenizer.eos_token_id
    (tokens,) = encode_texts(tokenizer, ["bad"])
    assert tokens.tolist() == [tokenizer.cls_token_id, *tokenizer.encode(" bad")]


def test_digest_depends_on_texts_and_labels(files: Path) -> None:
    digests = {prepared(files).digest}
    (files / "train.tsv").write_text(TRAIN.replace("2\tneg", "2\tpos").replace("3\tpos", "3\tneg"))
    digests.add(prepared(files).digest)
    digests.add(prepared(files, labels=("pos", "neg")).digest)
    (files / "dev.tsv").rename(files / "moved.tsv")
    moved = prepared(files, validation_path=f"{files}/moved.tsv")
    assert len(digests) == 3
    assert prepared(files, validation_path=f"{files}/moved.tsv").digest == moved.digest
    assert moved.digest in digests


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "train.tsv: is empty"),
        ("text\tid\tlabel\n", "train.tsv: is empty"),
        ("text\tid\nx\t1\n", r"train.tsv:2: has no column 'label' \(it has text, id\)"),
        ("text\tid\tlabel\nx\t1\tpos\n\ny\t2\n", "train.tsv:4: has 2 columns, and .* has 3"),
        ("text\tid\tlabel\nx\t1\t\n", "train.tsv:2: its label is empty"),
        ("text\tid\tlabel\nx\t1\tpos\n", r"dev.tsv:2: label 'neg' is not .* split \(pos\)"),
    ],
)
def test_errors_name_the_line(files: Path, content: str, message: str) -> None:
    (files / "train.tsv").write_text(content)
    with pytest.raises(UserError, match=message):
        prepared(files)


def test_label_without_text_is_an_error(files: Path) -> None:
    (files / "train.tsv").write_text("DESC\n")
    with pytest.raises(UserError, match=r"train\.tsv:1: has one word only"):
        prepared(files, format="label_first")
