import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import normal
from transformer.layers.basic import dropout as dropout_eagerly
from transformer.layers.basic import fold_in

KEYS = jax.random.split(jax.random.key(0), 3)
dropout = jax.jit(dropout_eagerly, static_argnames="dropout_rate")


def test_entries_are_zero_or_rescaled() -> None:
    x = np.full((3, 101, 103), 3.0, np.float32)
    y = np.asarray(dropout(x, 0.25, KEYS))
    assert set(np.unique(y)) == {0.0, 4.0}
    # The standard error of the fraction of 31,209 draws is 0.25%.
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.01)


def test_masks_depend_on_the_key_of_the_example_alone() -> None:
    x, rows = normal(0, 3, 7, 11), np.array([2, 0])
    full = np.asarray(dropout(x, 0.5, KEYS))
    assert np.array_equal(dropout(x[rows], 0.5, KEYS[rows]), full[rows])


def test_no_dropout_without_rngs_or_rate() -> None:
    x = jnp.ones((3, 7))
    assert dropout_eagerly(x, 0.5, None) is x
    assert dropout_eagerly(x, 0.0, KEYS) is x


def test_gradient_of_kept_entries() -> None:
    x = normal(0, 3, 101)
    gradient = jax.jit(jax.grad(lambda x: dropout_eagerly(x, 0.75, KEYS).sum()))(x)
    assert np.array_equal(gradient, np.where(np.asarray(dropout(x, 0.75, KEYS)) == 0, 0, 4))


def test_rngs_are_folded_per_example() -> None:
    folded = fold_in(KEYS, 7)
    assert folded is not None
    expected = jnp.stack([jax.random.fold_in(key, 7) for key in KEYS])
    assert (jax.random.key_data(folded) == jax.random.key_data(expected)).all()
    assert fold_in(None, 7) is None
