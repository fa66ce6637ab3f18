"""The form of a feed-forward layer for GPUs, computed on a CPU."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta
from scipy.special import ndtr

from tests.transformer.formulas import assert_close, assert_trees_close, normal, random_params_like
from transformer import FeedForwardConfig, Hardware, Initialization, Precision
from transformer.layers.activations import gelu_by_exponential
from transformer.layers.feedforward import FeedForward
from transformer.model_context import ModelContext

B, T, D, F = 2, 3, 5, 7
CONTEXT = ModelContext(D, 3, Precision(), Initialization(), Hardware())
X: Any = np.linspace(-9, 9, 2001, dtype=np.float32)


@pytest.mark.parametrize(
    "config",
    [
        FeedForwardConfig(F, "gelu"),
        FeedForwardConfig(F, "gelu_tanh", gated=True),
        FeedForwardConfig(F, "silu", gated=True, bias=False),
        FeedForwardConfig(F, "learned_swish", gated=True),
        FeedForwardConfig(F, "swish", gated=True, swish_beta=1.7, gate_clamp=0.5),
    ],
    ids=lambda config: config.activation,
)
def test_equals_the_form_of_a_cpu(config: FeedForwardConfig) -> None:
    x, dy = normal(1, B, T, D), normal(2, B, T, D)
    modules = [
        FeedForward(config, dataclasses.replace(CONTEXT, hardware=hardware))
        for hardware in (Hardware(), Hardware("gpu"))
    ]
    starts = [meta.unbox(jax.eval_shape(each.init, jax.random.key(0), x)) for each in modules]
    assert starts[0] == starts[1]

    @jax.jit
    def both(params: Any, x: Any, dy: Any) -> Any:
        results = []
        for module in modules:

            def run(params: Any, x: Any, module: FeedForward = module) -> Any:
                output: Any = module.apply({"params": params}, x)
                return output.y

            y, vjp = jax.vjp(run, params, x)
            results.append((y, vjp(dy)))
        return results

    on_a_cpu, on_a_gpu = both(random_params_like(starts[0]["params"]), x, dy)
    assert_trees_close(on_a_gpu, on_a_cpu)


def test_steps_of_the_activation_are_not_saved() -> None:
    x = normal(1, B, T, D)

    def saved(hardware: Hardware) -> int:
        config = FeedForwardConfig(11, "gelu", gated=True)
        module = FeedForward(config, dataclasses.replace(CONTEXT, hardware=hardware))
        params = meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x)["params"])

        def run(params: Any) -> Any:
            output: Any = module.apply({"params": params}, x)
            return output.y

        vjp = jax.eval_shape(lambda params: jax.vjp(run, params)[1], params)
        return sum(leaf.shape == (B, T, 11) for leaf in jax.tree.leaves(vjp))

    # The products gate x and up x, and the input of the last product.
    assert saved(Hardware("gpu")) == 3
    assert saved(Hardware()) > 3


def test_gelu_matches_the_normal_distribution() -> None:
    cdf = ndtr(X.astype(np.float64))
    density = np.exp(-0.5 * X.astype(np.float64) ** 2) / math.sqrt(2 * math.pi)

    @jax.jit
    def value_slope_and_tangent(x: Any) -> Any:
        slope = jax.vmap(jax.grad(gelu_by_exponential))(x)
        _, tangent = jax.jvp(gelu_by_exponential, (x,), (jnp.ones_like(x),))
        return gelu_by_exponential(x), slope, tangent

    y, slope, tangent = value_slope_and_tangent(X)
    assert_close(y, X * cdf, 1e-6)
    assert_close(slope, cdf + X * density, 1e-6)
    assert_close(tangent, slope, 1e-6)


def test_gelu_in_bfloat16_is_rounded_once() -> None:
    """Also in the tail, where Phi is small: the relative error is that of one rounding."""
    x = jnp.asarray(X, jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact *= ndtr(exact)
    y = gelu_by_exponential(x)  # not compiled: XLA would round less often than the code says
    assert y.dtype == jnp.bfloat16
    actual = np.asarray(y, np.float64)
    large = np.abs(exact) > 1e-30
    assert np.max(np.abs(actual - exact)[large] / np.abs(exact)[large]) < 2.0**-8
