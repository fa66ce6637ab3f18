import jax
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, normal
from transformer.attention.scores import additive_scores

B, T, S, N, A = 2, 5, 7, 6, 11


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_matches_formula(kv_heads: int) -> None:
    """w . tanh(q + k), where query head n uses key-value head n div G."""
    vector, q, k = normal(0, N, A), normal(1, B, T, N, A), normal(2, B, S, kv_heads, A)
    expected = np.zeros((B, N, T, S))
    for b, n, t, s in np.ndindex(expected.shape):
        key = k[b, s, n // (N // kv_heads)]
        expected[b, n, t, s] = vector[n] @ np.tanh(q[b, t, n] + key)
    actual = jax.jit(additive_scores, static_argnums=(3, 4))(vector, q, k, "float32", "float32")
    assert_close(actual, expected)
