from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fixtures.positions import ALIBI_HEADS
from tests.transformer.formulas import array, assert_close
from transformer.attention.position_bias import alibi_bias, alibi_slopes

FIXTURES = Path(__file__).parents[2] / "fixtures" / "positions.npz"


@pytest.mark.parametrize("heads", ALIBI_HEADS)
def test_slopes_are_hugging_face_s(heads: int) -> None:
    assert_close(alibi_slopes(heads), np.load(FIXTURES)[f"alibi/{heads}"], 1e-7)


def test_slopes_by_hand() -> None:
    """The paper's of 8 heads; 3 heads have those of 2, and the first of 4."""
    assert alibi_slopes(8).tolist() == [
        1 / 2,
        1 / 4,
        1 / 8,
        1 / 16,
        1 / 32,
        1 / 64,
        1 / 128,
        1 / 256,
    ]
    assert alibi_slopes(3).tolist() == [1 / 16, 1 / 256, 1 / 4]


def test_scores_fall_with_the_distance_both_ways() -> None:
    queries, keys = array([[0, 5], [7, 7]]), array([[0, 1, 5], [9, 6, 7]])
    bias = jax.jit(alibi_bias, static_argnums=0)(2, queries, keys)
    away = np.array([[[0, 1, 5], [5, 4, 0]], [[2, 1, 0], [2, 1, 0]]])
    assert np.array_equal(bias, np.stack([-away / 16, -away / 256], axis=1).astype(np.float32))
