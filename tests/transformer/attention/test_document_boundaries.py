"""Document boundaries in packed rows, by hand."""

import numpy as np

from tests.transformer.formulas import array
from transformer import Mask
from transformer.attention.document_boundaries import previous_segments, token_segments

SEGMENTS = array([[1, 1, 0, 1, 2, 2, 0], [0, 3, 3, 3, 0, 5, 5]])


def test_no_segments_and_lengths_is_one_document() -> None:
    assert token_segments(Mask(), 7) is None


def test_key_lengths_mark_trailing_padding() -> None:
    actual = token_segments(Mask(key_lengths=array([3, 0])), 4)
    assert np.asarray(actual).tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    actual = token_segments(Mask(segments=SEGMENTS, key_lengths=array([2, 6])), 7)
    assert np.asarray(actual).tolist() == [[1, 1, 0, 0, 0, 0, 0], [0, 3, 3, 3, 0, 5, 0]]


def test_previous_segments_skip_padding() -> None:
    expected = [[0, 1, 1, 1, 1, 2, 2], [0, 0, 3, 3, 3, 3, 5]]
    assert previous_segments(SEGMENTS).tolist() == expected
