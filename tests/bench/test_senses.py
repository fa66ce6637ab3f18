"""Senses by context: which characters are prose, where words stand, whose neighbour is whose."""

import numpy as np
import pytest

from bench.senses import (
    Occurrence,
    balance,
    is_prose,
    nearest,
    prose_spans,
    same_sense,
)

SOURCE = """def f(x):
    # not for all
    return x in "it is in"  # as it is
"""


def test_prose_is_comments_and_strings() -> None:
    spans = prose_spans(SOURCE)
    texts = [SOURCE[begin:end] for begin, end in spans]
    assert texts == ["# not for all", '"it is in"', "# as it is"]
    for index, letter in enumerate(SOURCE):
        inside = any(begin <= index < end for begin, end in spans)
        assert is_prose(spans, index) == inside, (index, letter)


def test_neighbours_are_in_another_file() -> None:
    states = np.array([[1.0, 0.0], [9.0, 0.1], [1.0, 1.0], [0.0, 1.0]])
    np.testing.assert_array_equal(nearest(states, np.arange(4)), [1, 0, 1, 2])
    np.testing.assert_array_equal(nearest(states, np.array([0, 0, 1, 1])), [2, 2, 1, 1])
    # Equal states are near by chance.
    many = nearest(np.ones((200, 3)), np.arange(200))
    assert len(set(many.tolist())) > 90
    assert (many != np.arange(200)).all()


def test_shares_count_senses() -> None:
    occurrences = [Occurrence(index, 0, 0, index % 3 == 0, "") for index in range(30)]
    balanced = balance(occurrences)
    assert [each.is_code for each in balanced] == [False] * 10 + [True] * 10
    signs = np.array([[1.0 if each.is_code else -1.0] for each in balanced])
    mixed = np.ones_like(signs)
    shares = same_sense({"in": balanced}, {"in": np.stack([mixed, signs])})
    assert shares["in"][1] == 1
    assert shares["in"][0] == pytest.approx(0.5, abs=0.3)
