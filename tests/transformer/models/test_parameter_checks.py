"""Parameters that a model does not read, or of another dtype, are errors when it is applied."""

import copy
import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax.core import freeze

from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    LanguageModel,
    TransformerConfig,
    generate,
)
from transformer.layers.stack_weights import unstack_for_decoding
from transformer.lora import LoRALayout
from transformer.models.model import Model
from transformer.models.parameter_checks import DECLARED, declared_tree, leaf_paths, plain_tree

MIXER = AttentionConfig(num_heads=2, bias=False)
CONFIG = TransformerConfig(11, 8, 4, (BlockConfig(MIXER), BlockConfig(AttentionConfig())))
MODEL = LanguageModel(CONFIG)
CROSS = EncoderDecoder(
    dataclasses.replace(
        CONFIG,
        layer_pattern=(BlockConfig(MIXER, cross_attention=MIXER),),
        encoder=EncoderConfig(num_layers=3, vocab_size=5),
    )
)
TOKENS = np.zeros((2, 3), np.int32)

Params = Any


def zeros(model: Model) -> Params:
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


PARAMS = zeros(MODEL)


def trace(model: Model, params: Params, *inputs: Any) -> Any:
    return jax.eval_shape(lambda params: model.apply({"params": params}, *inputs), params)


def added(*paths: str, params: Params = PARAMS) -> Params:
    """Return parameters with more weights, of the right shapes or not."""
    result = copy.deepcopy(params)
    for path in paths:
        *folders, name = path.split("/")
        place = result
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = np.zeros((2, 2, 4), np.float32)
    return result


BIAS = "layers/place_0/mixer/query_bias"


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        ([BIAS], BIAS),
        (["final_norm/offset", BIAS], f"final_norm/offset, {BIAS}"),
        (["a", "b", "c", "d", "e/f"], "a, b, c and 2 more"),
    ],
)
def test_weights_that_a_model_does_not_have(paths: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=f"^params {named}: the model has no such weights"):
        trace(MODEL, added(*paths), TOKENS)


def test_weights_of_other_classes_are_checked_too() -> None:
    extra, layout = added(BIAS), LoRALayout.create(MODEL.logical_axes(), rank=1)
    adapter = jax.eval_shape(layout.init, jax.random.key(0), extra)
    unstacked = jax.eval_shape(unstack_for_decoding, extra)
    for params in (unstacked, layout.combine(adapter, extra), freeze(extra)):
        with pytest.raises(ValueError, match=f"^params {BIAS}: the model has no such"):
            trace(MODEL, params, TOKENS)
    with pytest.raises(ValueError, match=f"^params {BIAS}: the model has no such"):
        generate(MODEL, extra, [[1]], max_new_tokens=1)


def test_an_eager_call_is_checked_before_anything_is_computed() -> None:
    for _ in range(2):  # the verdict of the first call is not remembered as a good one
        with pytest.raises(ValueError, match=f"^params {BIAS}: the model has no such"):
            MODEL.apply({"params": added(BIAS)}, TOKENS)


def test_a_trace_of_one_repetition_declares_all_weights() -> None:
    params = zeros(CROSS)
    assert set(leaf_paths(declared_tree(CROSS))) == set(leaf_paths(plain_tree(params)))
    del params["decoder"]  # not read by the encoder alone
    assert trace(CROSS, params, TOKENS, None).hidden.shape == (2, 3, 8)


def test_trees_that_were_not_made_by_init_are_accepted() -> None:
    """Frozen, of an equal model, or with None where another tree of the user's has a weight."""
    other = LanguageModel(dataclasses.replace(CONFIG, vocab_size=9))
    structure = jax.tree.structure({"params": PARAMS})
    assert (LanguageModel, CONFIG, structure) in DECLARED
    assert (LanguageModel, other.config, structure) not in DECLARED
    for given in (PARAMS, freeze(PARAMS), PARAMS | {"unused": None}):
        assert trace(other, given, TOKENS).logits.shape == (2, 3, 9)
    assert (LanguageModel, other.config, structure) in DECLARED


def test_interceptors_do_not_see_the_check() -> None:
    other = LanguageModel(dataclasses.replace(CONFIG, vocab_size=7))
    called = []

    def intercept(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
        called.append((type(context.module).__name__, context.method_name))
        return method(*args, **kwargs)

    with nn.intercept_methods(intercept):
        trace(other, PARAMS, TOKENS)
    assert called.count(("LanguageModel", "__call__")) == 1
    assert called.count(("Attention", "__call__")) == CONFIG.num_layers


def test_a_class_of_ones_own_may_have_weights_of_its_own() -> None:
    class WithTemperature(LanguageModel):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> Any:  # type: ignore[override]
            output: Any = super().__call__(tokens)
            temperature = self.param("temperature", nn.initializers.ones, ())
            return output._replace(logits=output.logits / temperature)

    params = PARAMS | {"temperature": np.float32(2), "unread": np.float32(1)}
    assert trace(WithTemperature(CONFIG), params, TOKENS).logits.shape == (2, 3, 11)


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda leaf: leaf.astype(int), "weight embedding of dtype int64: the model has floats"),
        (lambda leaf: 0.5, "weight embedding of type float: is not an array"),
        (lambda leaf: leaf[:1], "weight embedding of shape (1, 8): the model has (128, 8)"),
    ],
)
def test_weights_of_another_kind(convert: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        MODEL.apply({"params": jax.tree.map(convert, PARAMS)}, TOKENS)


def test_weights_of_other_float_dtypes_are_accepted() -> None:
    for dtype in (np.float16, jax.numpy.bfloat16):
        params = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), PARAMS)
        assert trace(MODEL, params, TOKENS).logits.dtype == np.float32
