"""The bag of embeddings against its formula; it ignores the order of tokens."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, feed_forward, random_params_like
from transformer import Classifier
from transformer.baselines.model_configs import bag_of_embeddings_config
from transformer.testing.contract import check_mixer

V, D, F, C, L = 11, 5, 7, 3, 2
TOKENS = array([[3, 9, 4, 4, 1], [8, 2, 10, 0, 0]])
SEGMENTS = array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
MODEL = Classifier(
    bag_of_embeddings_config(D, F, num_layers=L, vocab_size=V, pad_vocab_to_multiple=1),
    num_classes=C,
    pooling="mean",
)


@pytest.fixture(scope="module")
def params() -> Any:
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), *MODEL.example_inputs())
    return random_params_like(shapes["params"])


def logits(params: Any, tokens: Array) -> Array:
    run = jax.jit(MODEL.apply)
    return np.asarray(run({"params": params}, tokens, segments=SEGMENTS).logits)


def test_matches_formula(params: Any) -> None:
    x = params["embedding"][TOKENS]
    for layer in range(L):
        mlp = params["layers"]["place_0"]["feed_forward"]
        x = feed_forward(x, {name: each[layer] for name, each in mlp.items()}, "relu")
    mean = np.stack([row[is_token == 1].mean(0) for row, is_token in zip(x, SEGMENTS, strict=True)])
    assert_close(logits(params, TOKENS), mean @ params["head"] + params["head_bias"])


def test_word_order_does_not_matter(params: Any) -> None:
    reversed_tokens = np.stack([TOKENS[0, ::-1], TOKENS[1, [2, 0, 1, 3, 4]]])
    assert_close(logits(params, reversed_tokens), logits(params, TOKENS))
    other = np.stack([TOKENS[0] + 1, TOKENS[1]])
    assert np.abs(logits(params, other) - logits(params, TOKENS))[0].max() > 1e-2


def test_identity_mixer_contract() -> None:
    check_mixer("identity", d_model=6, length=17, lengths=(1, 17, 23))
