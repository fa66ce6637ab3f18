"""The four forms of attention within a window that `bench.race.long_attention` times."""

import math

import jax
import numpy as np
import pytest

from bench.race.long_attention import FORMS, inputs


@pytest.mark.parametrize("form", FORMS)
def test_every_implementation_is_softmax_over_the_window(form: str) -> None:
    window, length, width = 3, 15, 5
    arrays = inputs(length, 2, width)
    q, k, v = (np.asarray(each) for each in arrays)
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(width)
    index = np.arange(length)
    near = np.abs(index[:, None] - index[None]) <= window
    exp_scores = np.where(near, np.exp(scores), 0)
    expected = np.einsum("BNTS,BSNH->BTNH", exp_scores / exp_scores.sum(-1, keepdims=True), v)
    actual = np.asarray(jax.jit(FORMS[form], static_argnums=3)(*arrays, window))
    assert np.abs(actual - expected).max() <= 1e-5 * max(1, np.abs(expected).max())
