import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data.buckets import bucket_by_rows
from train.data.data_config import TokenizerConfig
from train.data.examples import ExampleCorpus, ExampleEvaluationBatches
from train.data.files import Notes, TextFile
from train.data.token_labels import (
    TokenLabelDataConfig,
    TokenLabelSplit,
    encode_words,
    make_token_label_split,
    prepare_token_labels,
    read_sentences,
    read_tagged_sentences,
    split_into_rows,
)
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError

CONLLU = """\
# sent_id = 1
# text = He didn't.
1\tHe\the\tPRON\tPRP\t_\t2\tnsubj\t_\t_
2-3\tdidn't\t_\t_\t_\t_\t_\t_\t_\tSpaceAfter=No
2\tdid\tdo\tAUX\tVBD\t_\t0\troot\t_\t_
3\tn't\tnot\tPART\tRB\t_\t2\tadvmod\t_\t_
3.1\tcome\tcome\tVERB\tVB\t_\t_\t_\t_\t_
4\t.\t.\tPUNCT\t.\t_\t2\tpunct\t_\t_


# text = # 20 000
1\t#\t#\tSYM\t$\t_\t2\tdep\t_\t_
2\t20 000\t20 000\tNUM\tCD\t_\t0\troot\t_\t_
"""

COLUMNS = """\
-DOCSTART- -X- -X- O

U.N. NNP I-NP I-ORG
official NN I-NP O

# NN I-NP O
Ekeus\tNNP\tI-NP\tI-PER
"""


def read(folder: Path, content: str, **settings: Any) -> list[list[tuple[str, str]]]:
    file = TextFile("a.conll", folder / "a.conll")
    file.path.write_text(content)
    sentences = read_sentences(TokenLabelDataConfig(**settings), file, Notes())
    return [[(word.text, word.tag) for word in sentence] for sentence in sentences]


def test_conllu_skips_ranges_and_empty_nodes(tmp_path: Path) -> None:
    assert read(tmp_path, CONLLU) == [
        [("He", "PRON"), ("did", "AUX"), ("n't", "PART"), (".", "PUNCT")],
        [("#", "SYM"), ("20 000", "NUM")],
    ]
    xpos = read(tmp_path, CONLLU, tag_column="xpos")
    assert [tag for _, tag in xpos[0]] == ["PRP", "VBD", "RB", "."]


def test_columns_are_word_first_and_tag_last(tmp_path: Path) -> None:
    assert read(tmp_path, COLUMNS) == [
        [("U.N.", "I-ORG"), ("official", "O")],
        [("#", "O"), ("Ekeus", "I-PER")],
    ]


def test_comments_and_spaces_of_columns(tmp_path: Path) -> None:
    spaces = "# id 7 domain=en\nNew\u00a0York _ _ B-LOC\n# _ _ O\n\n# id 8 a=b\nno _ _ O\n"
    assert read(tmp_path, spaces) == [[("New\u00a0York", "B-LOC"), ("#", "O")], [("no", "O")]]
    tabs = "10 000\t_\tO\n#\t_\tO\n"
    assert read(tmp_path, tabs) == [[("10 000", "O"), ("#", "O")]]


def test_rows_of_words_and_tags(tmp_path: Path) -> None:
    rows = [{"tokens": ["a", "b"], "ner_tags": ["O", "B"]}, {"tokens": ["c"], "ner_tags": None}]
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    splits = read_tagged_sentences(TokenLabelDataConfig(path=str(tmp_path / "a.json")))
    assert [word[:2] for word in splits["train"][0]] == [("a", "O"), ("b", "B")]
    assert (len(splits["train"]), len(splits["validation"]), len(splits.notes)) == (1, 1, 1)
    located = [each[1:] for split in splits.values() for each in split[0]]
    assert sorted(where[-2:] for _, where in located) == [":1", ":1", ":3", ":3"]


def test_error_locations_are_file_lines(tmp_path: Path) -> None:
    (tmp_path / "a.conllu").write_text(CONLLU)
    file = TextFile("a.conllu", tmp_path / "a.conllu")
    _, last = read_sentences(TokenLabelDataConfig(), file, Notes())
    assert [each[1:] for each in last] == [
        ("SYM", f"{tmp_path}/a.conllu:12"),
        ("NUM", f"{tmp_path}/a.conllu:13"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5\tx\tx\tNOUN", r"a\.conll:9: is not a word number and the other 9 columns"),
        ("x\tx\tx\tX\tX\t_\t_\t_\t_\t_", r"a\.conll:9: is not a word number"),
        ("5\tx\tx\t_\tX\t_\t_\t_\t_\t_", r"a\.conll:9: word 'x' has no upos; .* data\.tag"),
    ],
)
def test_invalid_lines_are_errors(tmp_path: Path, line: str, message: str) -> None:
    lines = CONLLU.splitlines()
    lines[8] = line
    with pytest.raises(UserError, match=message):
        read(tmp_path, "\n".join(lines))


def test_word_without_tag(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.conll:2: has one column only; a word must be the"):
        read(tmp_path, "a O\nb\n")


TRAIN = "the D\ncat N\n\ncats N\nsat V\n\nit P\nsat V\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "train").write_text(TRAIN)
    (tmp_path / "dev").write_text("it P\n\nthe D\ncat N\nsat V\n")
    return tmp_path


def prepared(
    folder: Path, labels: tuple[str, ...] | None = None, **settings: Any
) -> ExampleCorpus[TokenLabelSplit]:
    defaults: dict[str, Any] = {
        "path": f"{folder}/train",
        "validation_path": f"{folder}/dev",
        "max_length": 16,
        "tokenizer": TokenizerConfig("character"),
    }
    return prepare_token_labels(TokenLabelDataConfig(**defaults | settings), labels=labels)


def test_batch_matches_hand_computed_values(files: Path) -> None:
    corpus = prepared(files)
    assert corpus.labels == ("D", "N", "P", "V")
    assert corpus.notes == ()
    split = corpus.split("train")
    assert split.lengths.tolist() == [[8], [9], [7]]
    tokens = [corpus.tokenizer.encode(text).tolist() for text in (" the cat", " it sat")]
    batch = split.batch(np.array([0, -1, 2]), (9,))
    assert batch["tokens"].tolist() == [[*tokens[0], 0], [0] * 9, [*tokens[1], 0, 0]]
    assert batch["segments"].tolist() == [[1] * 8 + [0], [0] * 9, [1] * 7 + [0, 0]]
    assert batch["targets"].tolist() == [
        [0, 0, 0, 0, 1, 0, 0, 0, 0],
        [0] * 9,
        [2, 0, 0, 3, 0, 0, 0, 0, 0],
    ]
    assert batch["weights"].tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 0, 0],
        [0] * 9,
        [1, 0, 0, 1, 0, 0, 0, 0, 0],
    ]
    assert batch["examples"].tolist() == [0, 0, 2]
    types = [array.dtype.name for array in batch.values()]
    assert sorted(types) == ["float32", "int32", "int32", "int32", "uint32"]


@pytest.mark.parametrize(
    ("sizes", "longest", "rows"),
    [
        ([2, 3, 1], 6, [(0, 3)]),
        ([2, 3, 1], 5, [(0, 2), (2, 3)]),
        ([2, 3, 1], 4, [(0, 1), (1, 3)]),
        ([9, 1, 9, 9], 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([4], 4, [(0, 1)]),
    ],
)
def test_long_sentences_are_split_between_words(
    sizes: list[int], longest: int, rows: list[tuple[int, int]]
) -> None:
    assert list(split_into_rows(sizes, longest)) == rows


def test_no_word_is_lost(files: Path) -> None:
    corpus = prepared(files, max_length=4)
    split = corpus.split("train")
    assert split.sentence_indices.tolist() == [0, 0, 1, 1, 2, 2]
    assert split.lengths.max() == 4  # " cats" has five characters
    assert split.tags() == [["D", "N"], ["N", "V"], ["P", "V"]]
    assert corpus.notes[0].endswith("3 beside the 3 first ones")


def test_predictions_are_joined_by_sentence(files: Path) -> None:
    split = prepared(files, max_length=4).split("validation")
    answers: list[np.ndarray] = [np.zeros(0)] * len(split.tokens)
    buckets = bucket_by_rows(split.lengths, batch_size=2)
    batches = ExampleEvaluationBatches(split, buckets)
    for cursor in range(len(batches)):
        batch = batches.host_batch(cursor, 0, 1)
        right = np.where(batch["weights"] > 0, batch["targets"], 3)
        for row in np.flatnonzero(batch["weights"].any(axis=1)):
            answers[batch["examples"][row]] = right[row]
    assert split.tags(answers) == split.tags() == [["P"], ["D", "N", "V"]]
    answers[1] = np.full_like(answers[1], 3)
    assert split.tags(answers) == [["P"], ["V", "N", "V"]]


def test_subwords_include_the_space_before_a_word() -> None:
    tokenizer = train_tokenizer(TokenizerConfig("bpe", vocab_size=270), ["a cat sat on a cat"])
    known = encode_words(tokenizer, ["cat", "mat", "cat"])
    assert list(known) == ["cat", "mat"]
    assert known["cat"].tolist() == tokenizer.encode(" cat").tolist()
    full = tokenizer.encode(" cat mat").tolist()
    assert [*known["cat"], *known["mat"]] == full


def test_dropped_word_still_has_a_token() -> None:
    tokenizer = train_tokenizer(TokenizerConfig("wordpiece", vocab_size=50), ["a cat"])
    split = make_token_label_split(
        tokenizer, [["a", "\u200d\x00", "cat"]], [[0, 1, 0]], labels=("X", "Y"), max_length=9
    )
    assert split.tags() == [["X", "Y", "X"]]
    assert split.tokens[0].tolist() == [
        *tokenizer.encode("a"),
        tokenizer.eos_token_id,
        *tokenizer.encode("cat"),
    ]


def test_tags_of_an_existing_run_are_kept(files: Path) -> None:
    labels = ("V", "P", "N", "D", "X")
    corpus = prepared(files, labels=labels)
    assert corpus.labels == labels
    assert corpus.split("train").tags() == [["D", "N"], ["N", "V"], ["P", "V"]]
    assert corpus.digest != prepared(files).digest


def test_tag_absent_from_training(files: Path) -> None:
    (files / "dev").write_text("it P\n\nthe D\ncat NN\n")
    with pytest.raises(UserError, match=r"dev:4: tag 'NN' is not among .* \(D, N, P, V\)"):
        prepared(files)


def test_file_without_sentences_is_an_error(files: Path) -> None:
    (files / "train").write_text("-DOCSTART- O\n")
    with pytest.raises(UserError, match=r"data\.path .*train: has no examples"):
        prepared(files)
