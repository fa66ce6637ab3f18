from typing import Any

import jax
import numpy as np
import pytest
from flax.core import meta

from tests.transformer import formulas
from tests.transformer.formulas import assert_close, normal, random_params_like
from transformer import FeedForwardConfig, Hardware, Initialization, Precision
from transformer.layers.activations import ACTIVATIONS
from transformer.layers.feedforward import FeedForward, resolve_d_ff
from transformer.model_context import ModelContext

B, T, D, F = 2, 3, 5, 7
CONTEXT = ModelContext(D, 3, Precision(), Initialization(), Hardware())


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_match_numpy(name: Any) -> None:
    x: Any = np.linspace(-7, 7, 101, dtype=np.float32)
    assert_close(jax.jit(ACTIVATIONS[name])(x), formulas.ACTIVATIONS[name](x), 1e-6)


def make_module(config: FeedForwardConfig) -> tuple[FeedForward, Any]:
    module = FeedForward(config, CONTEXT)
    boxed = jax.eval_shape(module.init, jax.random.key(0), normal(0, B, T, D))
    return module, random_params_like(meta.unbox(boxed)["params"])


@pytest.mark.parametrize(
    ("activation", "gated", "bias"),
    [("squared_relu", False, True), ("gelu", True, True), ("silu", True, False)],
)
def test_matches_formula(activation: Any, gated: bool, bias: bool) -> None:
    module, params = make_module(FeedForwardConfig(F, activation, gated, bias))
    matrices = {"up": (D, F), "down": (F, D)} | ({"gate": (D, F)} if gated else {})
    biases = {f"{name}_bias": shape[1:] for name, shape in matrices.items()} if bias else {}
    assert {name: leaf.shape for name, leaf in params.items()} == matrices | biases
    x = normal(1, B, T, D)
    output = jax.jit(module.apply)({"params": params}, x)
    assert_close(output.y, formulas.feed_forward(x, params, activation))
    assert output.aux == {}


def test_fixed_beta() -> None:
    module, params = make_module(FeedForwardConfig(F, "swish", gated=True, swish_beta=1.7))
    x = normal(1, B, T, D)
    y = jax.jit(module.apply)({"params": params}, x).y
    assert_close(y, formulas.feed_forward(x, params, "swish", 1.7))


def test_learned_beta_gets_a_gradient() -> None:
    config = FeedForwardConfig(F, "learned_swish", swish_beta=0.5)
    module, params = make_module(config)
    x = normal(1, B, T, D)
    assert params["beta"].shape == ()
    start = meta.unbox(jax.jit(module.init)(jax.random.key(0), x)["params"])
    assert float(start["beta"]) == 0.5

    def total(beta: Any) -> Any:
        output: Any = module.apply({"params": params | {"beta": beta}}, x)
        return output.y.sum()

    def expected(beta: Any) -> Any:
        params64 = {name: value.astype(np.float64) for name, value in params.items()}
        return formulas.feed_forward(x, params64 | {"beta": beta}, "learned_swish").sum()

    beta = params["beta"]
    assert_close(jax.jit(total)(beta), expected(beta))
    derivative = (expected(np.float64(beta) + 1e-4) - expected(np.float64(beta) - 1e-4)) / 2e-4
    assert abs(derivative) > 0.1
    assert_close(jax.jit(jax.grad(total))(beta), derivative)


@pytest.mark.parametrize(
    ("config", "width", "hidden"),
    [
        (FeedForwardConfig(), 384, 1536),
        (FeedForwardConfig(gated=True), 384, 1024),
        (FeedForwardConfig(gated=True), 100, 320),  # 266.7, in multiples of 64
        (FeedForwardConfig(d_ff=11, gated=True), 384, 11),
    ],
)
def test_hidden_width(config: FeedForwardConfig, width: int, hidden: int) -> None:
    assert resolve_d_ff(config, width) == hidden


def test_dropout_applies_to_hidden_activations() -> None:
    module, params = make_module(FeedForwardConfig(F, "relu", bias=False, dropout=0.5))
    params = {"up": np.ones((D, F), np.float32), "down": np.eye(F, D, dtype=np.float32)}
    x, keys = np.ones((B, T, D), np.float32), jax.random.split(jax.random.key(0), B)
    y = jax.jit(module.apply)({"params": params}, x, keys).y
    assert set(np.unique(y)) == {0.0, 2.0 * D}
    assert set(np.unique(jax.jit(module.apply)({"params": params}, x).y)) == {float(D)}
