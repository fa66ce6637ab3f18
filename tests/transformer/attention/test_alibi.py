from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fixtures.positions import ALIBI_HEADS
from tests.transformer.formulas import array, assert_close
from transformer.attention.position_bias import alibi_bias, alibi_slopes

FIXTURES = Path(__file__).parents[2] / "fixtures" / "positions.npz"


@pytest.mark.parametrize("heads", ALIBI_HEADS)
def test_slopes_match_hugging_face(heads: int) -> None:
    assert_close(alibi_slopes(heads), np.load(FIXTURES)[f"alibi/{heads}"], 1e-7)


def test_slopes_match_paper() -> None:
    """The paper's slopes for 8 heads; 3 heads take those of 2 heads and the first of 4."""
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


def test_bias_falls_linearly_with_distance_in_both_directions() -> None:
    queries, keys = array([[0, 5], [7, 7]]), array([[0, 1, 5], [9, 6, 7]])
    bias = jax.jit(alibi_bias, static_argnums=0)(2, queries, keys)
    distance = np.array([[[0, 1, 5], [5, 4, 0]], [[2, 1, 0], [2, 1, 0]]])
    assert np.array_equal(
        bias, np.stack([-distance / 16, -distance / 256], axis=1).astype(np.float32)
    )
