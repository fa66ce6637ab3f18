from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from tests.transformer import formulas
from tests.transformer.formulas import assert_close, normal, random_params_like
from transformer import FeedForwardConfig, Hardware, Initialization, Precision
from transformer.layers.activations import ACTIVATIONS, swish
from transformer.layers.feedforward import FeedForward, resolve_d_ff
from transformer.model_context import ModelContext

B, T, D, F = 2, 3, 5, 7
CONTEXT = ModelContext(D, 3, Precision(), Initialization(), Hardware())


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("relu", 3.0, 3.0),
        ("relu", -3.0, 0.0),
        ("gelu", 1.0, 0.8413447),  # 1 times the normal distribution at 1
        ("gelu", -1.0, -0.1586553),
        ("gelu_tanh", 1.0, 0.8411920),
        ("silu", 1.0, 0.7310586),
        ("silu", -1.0, -0.2689414),
        ("squared_relu", 3.0, 9.0),
        ("squared_relu", -3.0, 0.0),
    ],
)
def test_activations_by_hand(name: Any, x: float, expected: float) -> None:
    assert float(ACTIVATIONS[name](jnp.array(x))) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_match_numpy(name: Any) -> None:
    x: Any = np.linspace(-7, 7, 101, dtype=np.float32)
    assert_close(ACTIVATIONS[name](x), formulas.ACTIVATIONS[name](x), 1e-6)


@pytest.mark.parametrize(
    ("x", "beta", "expected"),
    [
        (1.0, 1.0, 0.7310586),  # SiLU
        (3.0, 0.0, 1.5),  # half of x
        (1.0, 2.0, 0.8807971),
        (-1.0, 2.0, -0.1192029),
        (3.0, 100.0, 3.0),  # ReLU
        (-3.0, 100.0, 0.0),
    ],
)
def test_swish_by_hand(x: float, beta: float, expected: float) -> None:
    assert float(swish(jnp.array(x), beta)) == pytest.approx(expected, abs=1e-6)


def make_module(config: FeedForwardConfig) -> tuple[FeedForward, Any]:
    module = FeedForward(config, CONTEXT)
    boxed = jax.eval_shape(module.init, jax.random.key(0), normal(0, B, T, D))
    return module, random_params_like(meta.unbox(boxed)["params"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "gated"),
    [
        ("relu", False),
        ("gelu", False),
        ("gelu_tanh", False),
        ("squared_relu", False),
        ("relu", True),
        ("gelu", True),
        ("silu", True),
    ],
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


@pytest.mark.parametrize("gated", [True, False])
def test_fixed_beta(gated: bool) -> None:
    module, params = make_module(FeedForwardConfig(F, "swish", gated, swish_beta=1.7))
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
    ("settings", "message"),
    [
        ({"d_ff": -1}, "feed_forward.d_ff -1: give 0 or more"),
        ({"dropout": 1.0}, r"feed_forward.dropout 1.0: give a fraction in \[0, 1\)"),
        ({"activation": "tanh"}, "feed_forward.activation tanh: is not known; give one of relu,"),
        ({"swish_beta": 2.0}, "feed_forward.swish_beta 2.0: gelu_tanh has none; leave it at 1"),
    ],
)
def test_invalid_fields_raise(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeedForwardConfig(**settings)


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
