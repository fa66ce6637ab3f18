import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    Hardware,
    LanguageModel,
    Precision,
    TransformerConfig,
)
from transformer.chunked_cross_entropy import ChunkedCrossEntropy
from transformer.layers.precise_einsum import split_high_low
from transformer.models.embedding import get_output_matrix
from transformer.precision import POLICIES

CONFIG = TransformerConfig(
    vocab_size=13,
    d_model=10,
    num_layers=2,
    layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=5)),),
)
CUSTOM = Precision(compute="bfloat16", softmax="bfloat16")


@pytest.mark.parametrize(
    ("name", "parameters", "compute", "scales_loss"),
    [
        ("float32", "float32", "float32", False),
        ("bfloat16", "float32", "bfloat16", False),
        ("pure_bfloat16", "bfloat16", "bfloat16", False),
        ("float16", "float32", "float16", True),
        ("parameters=float16,compute=float32", "float16", "float32", True),
    ],
)
def test_policies(name: str, parameters: str, compute: str, scales_loss: bool) -> None:
    policy = Precision.parse(name)
    assert (policy.parameters, policy.compute) == (parameters, compute)
    assert (policy.softmax, policy.norm, policy.loss) == ("float32",) * 3
    assert policy.name == name or name not in POLICIES
    assert policy.needs_loss_scale == scales_loss


def test_policy_text_round_trip() -> None:
    assert Precision.parse("compute=bfloat16,softmax=bfloat16") == CUSTOM
    assert (
        CUSTOM.name
        == "parameters=float32,compute=bfloat16,softmax=bfloat16,norm=float32,loss=float32"
    )
    assert Precision.parse(CUSTOM.name) == CUSTOM


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("float8", "precision float8: float8 is not known"),
        ("compute=int8", "Precision.compute int8: is not known; give one of float32"),
        ("sums=float32", "precision sums=float32: sums is not known"),
        (None, "precision of type NoneType: give a string"),
    ],
)
def test_errors_name_the_part(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Precision.parse(text)


@pytest.mark.parametrize("name", POLICIES)
def test_dtypes_of_parameters_outputs_gradients_and_loss(name: str) -> None:
    policy = Precision.parse(name)
    model = LanguageModel(dataclasses.replace(CONFIG, precision=policy))
    tokens: Any = np.zeros((2, 3), int)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def total(params: Any) -> tuple[jax.Array, Any]:
        output: Any = model.apply({"params": params}, tokens)
        loss = ChunkedCrossEntropy(13, dtype=policy.loss)
        weights = jnp.ones(tokens.shape)
        matrix = get_output_matrix(params, model.config)
        return loss(output.hidden, matrix, tokens, weights), output

    (loss, output), gradients = jax.eval_shape(jax.value_and_grad(total, has_aux=True), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(policy.parameters)}
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(policy.parameters)}
    assert (output.hidden.dtype, output.logits.dtype) == (jnp.dtype(policy.compute),) * 2
    assert loss.dtype == jnp.float32
    cache = jax.eval_shape(lambda: model.init_cache(2, 3))
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(policy.compute)}


TOKENS = np.arange(14).reshape(2, 7) % 13


@pytest.fixture(scope="module")
def params() -> Any:
    model = LanguageModel(CONFIG)
    return random_params_like(jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"])


def hidden(params: Any, name: str) -> Any:
    policy = Precision.parse(name)
    model = LanguageModel(dataclasses.replace(CONFIG, precision=policy))
    params = jax.tree.map(lambda leaf: np.asarray(leaf, policy.parameters), params)
    return np.asarray(jax.jit(model.apply)({"params": params}, TOKENS).hidden, np.float32)


@pytest.fixture(scope="module")
def exact(params: Any) -> Any:
    return hidden(params, "float32")


@pytest.mark.parametrize("name", ["bfloat16", "pure_bfloat16", "float16"])
def test_sixteen_bit_results_are_close_to_float32(params: Any, exact: Any, name: str) -> None:
    assert 0 < np.abs(hidden(params, name) - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("hardware", "dtype"),
    [
        (Hardware(), "float32"),
        (Hardware("tpu", "TPU v5 lite"), "bfloat16"),
        (Hardware("gpu", "NVIDIA H100", compute_capability="9.0"), "bfloat16"),
        (Hardware("gpu", "NVIDIA L4", compute_capability="8.9"), "bfloat16"),
        (Hardware("gpu", "Tesla T4", compute_capability="7.5"), "float16"),
        (Hardware("gpu", "AMD", compute_capability="gfx942"), "bfloat16"),
        (Hardware("gpu", "unknown"), "bfloat16"),
    ],
)
def test_auto_depends_on_hardware(hardware: Hardware, dtype: str) -> None:
    result = Precision.parse("auto").resolve(hardware)
    assert result == Precision.parse(dtype)
    assert result.needs_loss_scale == (dtype == "float16")
    assert Precision.parse("pure_bfloat16").resolve(hardware) == Precision.parse("pure_bfloat16")


def test_models_reject_auto() -> None:
    auto = Precision.parse("auto")
    assert auto.name == "auto"
    model = LanguageModel(TransformerConfig(vocab_size=7, d_model=8, num_layers=1, precision=auto))
    with pytest.raises(
        ValueError, match=r"precision auto: is resolved by the trainer .*\.resolve\(hard"
    ):
        jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), np.int32))


def test_cache_dtype() -> None:
    assert Precision.parse("bfloat16").cache_dtype == "bfloat16"
    narrow = Precision.parse("compute=float32,cache=bfloat16")
    assert narrow.cache_dtype == "bfloat16"
    assert Precision.parse(narrow.name) == narrow


@pytest.mark.parametrize(("dtype", "digits"), [("bfloat16", 16), ("float16", 20)])
def test_two_narrow_parts_have_twice_the_digits(dtype: str, digits: int) -> None:
    x = np.random.default_rng(0).uniform(1, 2, 97).astype(np.float32)
    high, low = split_high_low(jnp.asarray(x), jnp.dtype(dtype))
    assert low is not None
    assert high.dtype == low.dtype == dtype
    np.testing.assert_array_equal(high, x.astype(high.dtype))
    total = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    assert np.abs(total - x).max() <= 2.0**-digits
    assert split_high_low(high, jnp.dtype(dtype))[1] is None
