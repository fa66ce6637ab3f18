"""`nth_largest` against sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import normal
from transformer.attention.sparse_ops.top_k_keys import nth_largest

ROWS = np.concatenate(
    [
        normal(0, 5, 17),
        1e30 * normal(1, 3, 17),
        1e-40 * normal(2, 2, 17),  # subnormal numbers
        np.round(2 * normal(3, 4, 17)),  # many ties
        np.where(normal(4, 3, 17) > 0, -np.inf, normal(5, 3, 17)),
        np.full((1, 17), -np.inf),
        np.full((1, 17), np.inf),
    ]
).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 9, 17])
def test_matches_sorting(count: int) -> None:
    actual = jax.jit(nth_largest, static_argnums=1)(jnp.asarray(ROWS), count)
    assert np.array_equal(actual, np.sort(ROWS, axis=-1)[:, ::-1][:, count - 1 : count])


def test_matches_sorting_in_bfloat16() -> None:
    rows = jnp.asarray(ROWS[:5], jnp.bfloat16)
    actual = jax.jit(nth_largest, static_argnums=1)(rows, 3)
    assert actual.dtype == jnp.bfloat16
    assert np.array_equal(actual, np.sort(np.asarray(rows, np.float32), axis=-1)[:, -3:-2])
