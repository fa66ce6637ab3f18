"""The n-th largest entry is the one that sorting finds."""

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
        np.round(2 * normal(3, 4, 17)),  # many alike
        np.where(normal(4, 3, 17) > 0, -np.inf, normal(5, 3, 17)),
        np.full((1, 17), -np.inf),
        np.full((1, 17), np.inf),
    ]
).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 9, 17])
def test_against_sorting(count: int) -> None:
    found = jax.jit(nth_largest, static_argnums=1)(jnp.asarray(ROWS), count)
    assert np.array_equal(found, np.sort(ROWS, axis=-1)[:, ::-1][:, count - 1 : count])


def test_in_sixteen_bits() -> None:
    rows = jnp.asarray(ROWS[:5], jnp.bfloat16)
    found = jax.jit(nth_largest, static_argnums=1)(rows, 3)
    assert found.dtype == jnp.bfloat16
    assert np.array_equal(found, np.sort(np.asarray(rows, np.float32), axis=-1)[:, -3:-2])
