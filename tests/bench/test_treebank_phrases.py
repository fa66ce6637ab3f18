"""Phrases of trees with labels: by hand, for one tree and for a file."""

from pathlib import Path

import pytest

from bench.treebank_phrases import labeled_phrases, main, phrases
from train.errors import UserError

TREE = "(3 (2 It) (4 (3 (2 's) (4 well-made)) (2 -RRB-)))"


def test_every_phrase_has_its_own_label() -> None:
    assert phrases(TREE) == [
        ("It", 2),
        ("'s", 2),
        ("well-made", 4),
        ("'s well-made", 3),
        ("-RRB-", 2),
        ("'s well-made -RRB-", 4),
        ("It 's well-made -RRB-", 3),
    ]


def test_neutral_and_repeated_phrases_are_left_out() -> None:
    bad = "(1 (0 dull) (2 !))"
    assert list(labeled_phrases([TREE, bad, TREE])) == [
        ("well made", 1),
        ("'s well made", 1),
        ("'s well made rrb", 1),
        ("it 's well made rrb", 1),
        ("dull", 0),
        ("dull !", 0),
    ]


@pytest.mark.parametrize("held_out", ["it 's well made rrb", "it 's well-made )"])
def test_phrases_of_held_out_sentences_are_left_out(held_out: str) -> None:
    assert [*labeled_phrases([TREE, "(0 (0 dull) (2 .))"], [held_out])] == [
        ("dull", 0),
        ("dull .", 0),
    ]


@pytest.mark.parametrize("line", ["", "It works .", "(3 (2 It) (4 works)", "(2 It))"])
def test_line_that_is_no_tree_raises(line: str) -> None:
    with pytest.raises(ValueError, match=r"^line 2 (is no tree, or ends|has a bracket too many)"):
        list(labeled_phrases([TREE, line]))


def test_file_of_phrases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trees.txt").write_text(f"{TREE}\n(0 (0 dull) (2 .))\n")
    for name, text in (("dev.tsv", "dull .\t0\n"), ("dev.txt", "(0 (0 dull) (2 .))\n")):
        (tmp_path / name).write_text(text)
        main(tmp_path / "trees.txt", tmp_path / "phrases.tsv", (tmp_path / name,))
    lines = (tmp_path / "phrases.tsv").read_text().splitlines()
    assert lines[0] == "well made\t1"
    assert len(lines) == 4
    assert "4 phrases of 2 trees" in capsys.readouterr().out
    (tmp_path / "trees.txt").write_text("no tree")
    with pytest.raises(UserError, match=r"trees.txt: line 1 is no tree"):
        main(tmp_path / "trees.txt", tmp_path / "phrases.tsv")
    (tmp_path / "dev.txt").write_text("(0 (0 dull)")
    with pytest.raises(UserError, match=r"dev.txt: line 1 is no tree, or ends within one"):
        main(tmp_path / "trees.txt", tmp_path / "phrases.tsv", (tmp_path / "dev.txt",))
