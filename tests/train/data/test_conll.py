from pathlib import Path
from typing import Any

import pytest

from train.data.example_configs import TokenLabelDataConfig
from train.data.token_labels import read_sentences
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
    (folder / "a.conll").write_text(content)
    sentences = read_sentences(
        TokenLabelDataConfig(**settings), "data.path", str(folder / "a.conll")
    )
    return [[(word.text, word.tag) for word in sentence.words] for sentence in sentences]


def test_conllu_has_words_and_neither_ranges_nor_empty_nodes(tmp_path: Path) -> None:
    assert read(tmp_path, CONLLU) == [
        [("He", "PRON"), ("did", "AUX"), ("n't", "PART"), (".", "PUNCT")],
        [("#", "SYM"), ("20 000", "NUM")],
    ]
    xpos = read(tmp_path, CONLLU, tag_column="xpos")
    assert [tag for _, tag in xpos[0]] == ["PRP", "VBD", "RB", "."]


def test_columns_have_the_word_first_and_the_tag_last(tmp_path: Path) -> None:
    assert read(tmp_path, COLUMNS, format="columns") == [
        [("U.N.", "I-ORG"), ("official", "O")],
        [("#", "O"), ("Ekeus", "I-PER")],
    ]


def test_places_are_lines_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.conllu").write_text(CONLLU)
    _, last = read_sentences(TokenLabelDataConfig(), "data.path", f"{tmp_path}/a.conllu")
    assert list(last.tag_locations()) == [
        ("SYM", f"{tmp_path}/a.conllu:12"),
        ("NUM", f"{tmp_path}/a.conllu:13"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("5\tx\tx\tNOUN", r"a\.conll:9: has 4 columns, not the 10 .* set data\.format to columns"),
        ("x\tx\tx\tX\tX\t_\t_\t_\t_\t_", r"a\.conll:9: 'x' is no word's number"),
        ("5\tx\tx\t_\tX\t_\t_\t_\t_\t_", r"a\.conll:9: word 'x' has no upos; .* data\.tag"),
    ],
)
def test_lines_that_are_wrong(tmp_path: Path, line: str, message: str) -> None:
    lines = CONLLU.splitlines()
    lines[8] = line
    with pytest.raises(UserError, match=message):
        read(tmp_path, "\n".join(lines))


def test_a_word_without_a_tag(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.conll:2: has one column only; a word must be the"):
        read(tmp_path, "a O\nb\n", format="columns")
