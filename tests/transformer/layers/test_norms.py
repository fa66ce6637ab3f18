import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import meta

from tests.transformer import formulas
from tests.transformer.formulas import assert_close, normal
from transformer import Hardware, Initialization, NormConfig, Precision
from transformer.layers.norms import Norm, layer_norm, rms_norm
from transformer.model_context import ModelContext
from transformer.precision import DType


def make_context(
    precision: Precision = Precision(),  # noqa: B008 - immutable
    hardware: Hardware = Hardware(),  # noqa: B008
) -> ModelContext:
    return ModelContext(11, 1, precision, Initialization(), hardware)


def test_norms_match_numpy() -> None:
    x, gain, bias = 3 + normal(0, 2, 3, 11), normal(1, 11), normal(2, 11)

    @jax.jit
    def norms(x: Any, gain: Any, bias: Any) -> Any:
        return (
            layer_norm(x, gain, bias, 0.1),
            layer_norm(x, gain, None, 0.1),
            rms_norm(x, gain, 0.1),
        )

    with_bias, without_bias, rms = norms(x, gain, bias)
    assert_close(with_bias, formulas.layer_norm(x, gain, bias, 0.1))
    assert_close(without_bias, formulas.layer_norm(x, gain, 0.0, 0.1))
    assert_close(rms, formulas.rms_norm(x, gain, 0.1))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (NormConfig(), {"gain", "bias"}),
        (NormConfig(bias=False), {"gain"}),
        (NormConfig("rms"), {"gain"}),
    ],
    ids=["layer", "layer without bias", "rms"],
)
def test_initial_module_is_the_plain_norm(config: NormConfig, names: set[str]) -> None:
    norm = Norm(config, make_context())
    x = 2 + normal(0, 2, 3, 11)
    params = meta.unbox(jax.jit(norm.init)(jax.random.key(0), x)["params"])
    assert {name: leaf.shape for name, leaf in params.items()} == dict.fromkeys(names, (11,))
    ones = np.ones(11, np.float32)
    plain = {
        "layer": formulas.layer_norm(x, ones, 0.0, 1e-5),
        "rms": formulas.rms_norm(x, ones, 1e-5),
    }
    assert_close(norm.apply({"params": params}, x), plain[config.kind])


@pytest.mark.parametrize("config", [NormConfig(), NormConfig("rms")], ids=["layer", "rms"])
def test_16_bit_input_is_normalized_in_the_policy_dtype(config: NormConfig) -> None:
    x: Any = normal(0, 3, 257).astype(jnp.bfloat16)
    params = {"gain": 1 + normal(1, 257), "bias": normal(2, 257)}

    def computed(x: Any, dtype: DType) -> Any:
        norm = Norm(config, make_context(Precision(compute="bfloat16", norm=dtype)))
        return np.asarray(jax.jit(norm.apply)({"params": params}, x))

    expected = computed(x.astype(np.float32), "float32").astype(jnp.bfloat16)
    found = computed(x, "float32")
    assert found.dtype == jnp.bfloat16
    assert np.array_equal(found, expected)
    assert not np.array_equal(computed(x, "bfloat16"), expected)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (NormConfig(), "float32"),
        (NormConfig(), "bfloat16"),
        (NormConfig(bias=False), "float32"),
        (NormConfig("rms"), "bfloat16"),
        (NormConfig("rms_offset"), "float32"),
        (NormConfig("layer_offset"), "float32"),
    ],
)
def test_gradients_on_a_gpu_equal_those_of_autodiff(config: NormConfig, dtype: DType) -> None:
    x = (2 + normal(0, 2, 5, 33)).astype(jnp.dtype(dtype))
    dy = normal(1, 2, 5, 33).astype(jnp.dtype(dtype))

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(hardware: Hardware, x: Any, dy: Any) -> Any:
        norm = Norm(config, make_context(Precision(compute=dtype), hardware))
        params = meta.unbox(norm.init(jax.random.key(0), x)["params"])
        params = {name: leaf + normal(2, 33) for name, leaf in params.items()}
        y, vjp = jax.vjp(lambda params, x: norm.apply({"params": params}, x), params, x)
        return y, vjp(dy)

    actual, expected = (gradients(Hardware(name), x, dy) for name in ("gpu", "cpu"))
    structures: list[Any] = [jax.tree.structure(each) for each in (actual, expected)]
    assert structures[0] == structures[1]
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        # Autodiff rounds to 16 bits in other places.
        tolerance = 1e-5 if dtype == "float32" else 2.0**-7
        assert_close(np.asarray(one, np.float32), np.asarray(other, np.float32), tolerance)


def test_float32_on_a_gpu_has_a_forward_derivative() -> None:
    @functools.partial(jax.jit, static_argnums=0)
    def derivative(hardware: Hardware, x: Any, dx: Any) -> jax.Array:
        norm = Norm(NormConfig(), make_context(Precision(), hardware))
        params = meta.unbox(norm.init(jax.random.key(0), x)["params"])
        return jax.jvp(lambda x: norm.apply({"params": params}, x), (x,), (dx,))[1]

    on_a_gpu, on_a_cpu = (
        np.asarray(derivative(Hardware(name), normal(0, 2, 5), normal(1, 2, 5)))
        for name in ("gpu", "cpu")
    )
    assert_close(on_a_gpu, on_a_cpu)
