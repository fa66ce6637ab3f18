import jax.numpy as jnp
import numpy as np

from bench.head_patterns import distances, reaches


def test_two_heads_by_hand() -> None:
    """One head attends to its own token, the other to the first; at the first query both agree."""
    itself = np.eye(3)
    first = np.array([[1.0, 0, 0]] * 3)
    weights = jnp.asarray(np.stack([itself, first])[None, None], jnp.float32)
    np.testing.assert_allclose(reaches(weights), [[0, 1]])
    np.testing.assert_allclose(distances(weights), [2 / 3], rtol=1e-6)
