"""Phrases of trees with labels: by hand, for one tree and for a file."""

import pytest

from bench.claims.words import labeled_phrases

TREE = "(3 (2 It) (4 (3 (2 's) (4 well-made)) (2 -RRB-)))"


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
