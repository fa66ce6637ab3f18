"""Parameters that do not belong to a model are refused where they are loaded."""

import copy
import re
from typing import Any

import jax
import numpy as np
import pytest

from transformer import (
    AttentionConfig,
    BlockConfig,
    LanguageModel,
    TransformerConfig,
    check_params,
)

MIXER = AttentionConfig(num_heads=2, bias=False)
CONFIG = TransformerConfig(11, 8, 4, (BlockConfig(MIXER), BlockConfig(AttentionConfig())))
MODEL = LanguageModel(CONFIG)
TOKENS = np.zeros((2, 3), np.int32)
BIAS = "layers/place_0/mixer/query_bias"

Params = Any


@pytest.fixture
def params() -> Params:
    shapes = jax.eval_shape(MODEL.init_params, jax.random.key(0))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def test_own_parameters_are_accepted(params: Params) -> None:
    check_params(MODEL, params)
    check_params(MODEL, jax.tree.map(lambda leaf: leaf.astype(jax.numpy.bfloat16), params))


def test_weights_that_a_model_does_not_have(params: Params) -> None:
    """Linen would ignore them."""
    params["layers"]["place_0"]["mixer"]["query_bias"] = np.zeros((2, 2, 4), np.float32)
    with pytest.raises(ValueError, match=f"^params {BIAS}: the model has no such weights"):
        check_params(MODEL, params)
    for name in "abcd":
        params[name] = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=r"^params a, b, c and 2 more: the model has no such"):
        check_params(MODEL, params)


def test_missing_weights(params: Params) -> None:
    del params["layers"]["place_1"]["mixer"]["key"]
    with pytest.raises(ValueError, match=r"^params layers/place_1/mixer/key: are missing"):
        check_params(MODEL, params)


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda leaf: leaf.astype(int), "params embedding of shape (128, 8), int"),
        (lambda leaf: leaf[:1], "params embedding of shape (1, 8), float32: the model has floats"),
    ],
)
def test_weights_of_another_kind(convert: Any, message: str, params: Params) -> None:
    changed = copy.copy(params) | {"embedding": convert(params["embedding"])}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_params(MODEL, changed)
    with pytest.raises(ValueError, match=r"^weight embedding of shape"):  # `apply` says it too
        MODEL.apply({"params": changed}, TOKENS)


def test_variables_in_place_of_parameters(params: Params) -> None:
    with pytest.raises(ValueError, match=r"^params: are no dict of weights"):
        check_params(MODEL, {"params": params})
