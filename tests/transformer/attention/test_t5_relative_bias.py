"""T5's buckets against Hugging Face and by hand."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.positions import BUCKETS, FURTHEST
from tests.transformer.formulas import array, normal
from transformer import T5RelativeBias
from transformer.attention.position_bias import t5_relative_bias

FIXTURES = Path(__file__).parents[2] / "fixtures" / "positions.npz"


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_match_hugging_face(name: str) -> None:
    config = T5RelativeBias(*BUCKETS[name])
    buckets = [config.bucket(distance) for distance in range(-FURTHEST, FURTHEST + 1)]
    assert buckets == np.load(FIXTURES)[f"buckets/{name}"].tolist()


def test_buckets_by_hand() -> None:
    """Two of four buckets are exact; the others start at 2 and 2 * sqrt(8 / 2) = 4.

    Future keys share bucket 0.
    """
    config = T5RelativeBias(num_buckets=4, max_distance=8)
    distances = (5, 0, -1, -2, -3, -4, -7, -8, -1000)
    assert [config.bucket(each) for each in distances] == [0, 0, 1, 2, 2, 3, 3, 3, 3]


def test_bidirectional_buckets_split_past_and_future() -> None:
    config = T5RelativeBias(num_buckets=8, max_distance=8, bidirectional=True)
    behind = [config.bucket(-distance) for distance in (0, 1, 2, 4, 9)]
    ahead = [config.bucket(distance) for distance in (1, 2, 4, 9)]
    assert behind == [0, 1, 2, 3, 3]
    assert ahead == [5, 6, 7, 7]


@pytest.mark.parametrize("examples", [1, 2])
def test_bias_matches_table_lookup(examples: int) -> None:
    config, table = T5RelativeBias(num_buckets=4, max_distance=8), normal(0, 4, 3)
    queries = array([[0, 1, 2, 3, 50], [7, 0, 2, 9, 1]])[:examples]
    keys = array([[0, 1, 2, 3, 4, 5, 6], [7, 3, 1, 2, 0, 9, 4]])[:examples]
    bias = jax.jit(t5_relative_bias, static_argnums=1)(table, config, queries, keys)
    expected = np.zeros((examples, 3, 5, 7), np.float32)
    for b, n, t, s in np.ndindex(expected.shape):
        expected[b, n, t, s] = table[config.bucket(keys[b, s] - queries[b, t]), n]
    assert np.array_equal(bias, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_buckets": 1}, "t5_relative_bias.num_buckets 1: give 2 or more"),
        ({"num_buckets": 7}, "t5_relative_bias.num_buckets 7: does not divide into halves; .*"),
        (
            {"num_buckets": 6, "bidirectional": True},
            "t5_relative_bias.num_buckets 6: does not divide into halves; give a multiple of 4",
        ),
        ({"max_distance": 16}, "t5_relative_bias.max_distance 16: give 17 or more"),
    ],
)
def test_invalid_fields_raise(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        T5RelativeBias(**fields)
