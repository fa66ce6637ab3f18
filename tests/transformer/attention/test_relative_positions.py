from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import array, assert_close, normal
from transformer.attention.position_bias import RelativeTables
from transformer.attention.position_config import RelativePositions

B, T, S, N, H, VALUES = 2, 5, 7, 3, 11, 13
CONFIG = RelativePositions(max_distance=2)
TABLES: Any = RelativeTables(normal(0, 5, H), normal(1, 5, VALUES))
POSITIONS = {
    "for all": (array([[0, 1, 2, 3, 9]]), array([[0, 1, 2, 3, 4, 5, 6]])),
    "for each": (
        array([[0, 1, 2, 3, 9], [4, 0, 1, 7, 7]]),
        array([[0, 1, 2, 3, 4, 5, 6], [7, 3, 1, 2, 0, 9, 4]]),
    ),
}


def table_row(query: int, key: int) -> int:
    """Return the row of w[clip(j - i, k)], counted from -k (equations 3 and 4)."""
    return max(-2, min(2, key - query)) + 2


@pytest.mark.parametrize("name", POSITIONS)
def test_score_and_value_terms_match_loops(name: str) -> None:
    queries, keys = POSITIONS[name]
    q, weights = normal(2, B, T, N, H), normal(3, B, N, T, S)
    scores, values = np.zeros((B, N, T, S)), np.zeros((B, T, N, VALUES))
    for b, n, t, s in np.ndindex(scores.shape):
        at = table_row(queries[b % len(queries), t], keys[b % len(keys), s])
        scores[b, n, t, s] = q[b, t, n] @ TABLES.keys[at]
        values[b, t, n] += weights[b, n, t, s] * TABLES.values[at]
    assert_close(
        jax.jit(RelativeTables.score_terms, static_argnums=4)(TABLES, q, queries, keys, "float32"),
        scores,
    )
    assert_close(
        jax.jit(RelativeTables.value_terms, static_argnums=4)(
            TABLES, weights, queries, keys, "float32"
        ),
        values,
    )


def test_number_of_distances() -> None:
    assert CONFIG.num_distances == 5
    assert RelativePositions(0).num_distances == 1
    with pytest.raises(ValueError, match=r"^relative_positions.max_distance -1: give 0 or more$"):
        RelativePositions(-1)
