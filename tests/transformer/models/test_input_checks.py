"""Random keys, token ids and positions that a model would ignore or read wrongly are errors."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    Classifier,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    LanguageModel,
    MaskedLanguageModel,
    NormConfig,
    TransformerConfig,
)
from transformer.models.model import Model

MIXER = AttentionConfig(num_heads=2, qk_norm=NormConfig("rms"))
BLOCK = BlockConfig(
    mixer=MIXER,
    feed_forward=FeedForwardConfig(12, gated=True),
    residual_dropout=0.5,
)
CONFIG = TransformerConfig(vocab_size=11, d_model=8, num_layers=2, layer_pattern=(BLOCK,))
MODEL = LanguageModel(CONFIG)
TOKENS = np.arange(10).reshape(2, 5)
POSITIONS = np.arange(5)[None]

Params = Any


def zeros(model: Model) -> Params:
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


PARAMS = zeros(MODEL)


def trace(model: Model, params: Params, *args: Any, **kwargs: Any) -> Any:
    return jax.eval_shape(lambda params: model.apply({"params": params}, *args, **kwargs), params)


def test_keys_of_both_kinds_are_keys_of_dropout() -> None:
    """Of `jax.random.key` and of `jax.random.PRNGKey`, with the same bits."""
    params = random_params_like(PARAMS)
    run = jax.jit(lambda key: MODEL.apply({"params": params}, TOKENS, rngs={"dropout": key}).hidden)
    found = [run(make(3)) for make in (jax.random.key, jax.random.PRNGKey)]
    np.testing.assert_array_equal(*found)
    assert not np.array_equal(found[0], run(jax.random.key(4)))


AT: dict[str, Any] = {"positions": POSITIONS}


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": TOKENS + 2}, "tokens: 11 is not one of the model's 11"),
        ({"tokens": TOKENS - 1}, "tokens: -1 is not one of the model's 11"),
        ({"segments": TOKENS * 0}, "segments: are all 0, which is padding"),
        ({"segments": TOKENS * 0 - 1}, "segments: -1 is not a document"),
        ({"tokens": TOKENS.tolist()}, "tokens of type list: give an array"),
        ({"segments": TOKENS / 2}, "segments of shape .*, float64"),
        (AT | {"cache": 3}, "cache of type int"),
        (AT | {"cache": MODEL.init_cache(3, 5)}, "cache: is for 3 examples, tokens has 2"),
        (AT | {"cache": MODEL.init_cache(2, 5)[:1]}, "cache: has 1 layers, the model 2"),
        (
            {"cache": MODEL.init_cache(2, 6), "positions": POSITIONS + 2},
            "positions: 5 tokens from position 2 are beyond the cache of 6",
        ),
        ({"edits": {"residual_pre": lambda value, layer: None}}, "edit of residual_pre: returns"),
    ],
)
def test_inputs_that_would_be_read_wrongly(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        MODEL.apply({"params": PARAMS}, **{"tokens": TOKENS} | arguments)


def test_a_source_has_a_vocabulary_and_segments_of_its_own() -> None:
    block = BlockConfig(cross_attention=AttentionConfig())
    encoder = EncoderConfig(num_layers=1, vocab_size=3)
    model = EncoderDecoder(dataclasses.replace(CONFIG, layer_pattern=(block,), encoder=encoder))
    variables = {"params": zeros(model)}
    with pytest.raises(ValueError, match="source: 9 is not one of the model's 3"):
        model.apply(variables, TOKENS, TOKENS)
    with pytest.raises(ValueError, match="source_segments: are all 0"):
        model.apply(variables, TOKENS, TOKENS, source_segments=TOKENS * 0)


def test_a_boolean_mask_of_padding_is_one_document() -> None:
    """As int32 segments, of 1 for a token and 0 for padding."""
    is_token = np.arange(5) < np.array([[5], [3]])
    run = jax.jit(
        lambda params, segments: MODEL.apply({"params": params}, TOKENS, segments=segments)
    )
    params = random_params_like(PARAMS)
    found = [run(params, is_token.astype(dtype)).hidden for dtype in (bool, np.int32)]
    np.testing.assert_array_equal(*found)


def test_models_that_read_both_sides_are_not_causal() -> None:
    with pytest.raises(ValueError, match="causal True: a masked language model reads both"):
        MaskedLanguageModel(CONFIG)
    with pytest.raises(ValueError, match=r"^pooling first: the first token of a causal model sees"):
        Classifier(CONFIG)
    assert Classifier(CONFIG, pooling="mean").config.causal
