"""Classifier, tagger and masked language model, each against its formula."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer import formulas
from tests.transformer.formulas import Array, array, assert_close, layer_norm, random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    Classifier,
    FeedForwardConfig,
    LearnedPositions,
    MaskedLanguageModel,
    Model,
    NormConfig,
    Tagger,
    TransformerConfig,
)
from transformer.inspection import layer_values
from transformer.models.config import PoolerConfig

T, V, ROWS, D, C = 5, 13, 16, 6, 3
EPSILON = 1e-3
CONFIG = TransformerConfig(
    vocab_size=V,
    d_model=D,
    num_layers=1,
    layer_pattern=(
        BlockConfig(
            mixer=AttentionConfig(num_heads=2),
            feed_forward=FeedForwardConfig(7, activation="gelu"),
            norm=NormConfig(epsilon=EPSILON),
            norm_placement="post",
        ),
    ),
    position_embedding=LearnedPositions(T + 2),
    embedding_norm=NormConfig(epsilon=EPSILON),
    num_token_types=2,
    causal=False,
    final_norm=None,
    pad_vocab_to_multiple=8,
)
POOLED = dataclasses.replace(CONFIG, pooler=True)
UNTIED = dataclasses.replace(CONFIG, tie_embeddings=False)

TOKENS = array([[3, 9, 4, 4, 1], [8, 2, 10, 0, 0], [5, 12, 7, 7, 7]])
SEGMENTS = array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
TYPES = array([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
IS_TOKEN = SEGMENTS == 1

FIRST, LAST, MEAN, MAX = (
    Classifier(CONFIG, num_classes=C, pooling="first"),
    Classifier(CONFIG, num_classes=C, pooling="last", head_bias=False),
    Classifier(CONFIG, num_classes=C, pooling="mean"),
    Classifier(CONFIG, num_classes=C, pooling="max"),
)
TANH = Classifier(POOLED, num_classes=C)
TAGGER, MASKED = Tagger(CONFIG, num_classes=C), MaskedLanguageModel(CONFIG)


@functools.cache
def make_model(model: Model) -> tuple[Any, Any]:
    """Return the model as a compiled function, and random parameters for it."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *model.example_inputs())["params"]
    return jax.jit(model.apply, static_argnames="outputs"), random_params_like(shapes)


def apply_model(model: Model, tokens: Array = TOKENS, **kwargs: Any) -> Any:
    run, params = make_model(model)
    return run({"params": params}, tokens, **(dict(segments=SEGMENTS, token_types=TYPES) | kwargs))


def expected_norm(x: Array, norm: dict[str, Array]) -> Array:
    return layer_norm(x, norm["gain"], norm["bias"], EPSILON)


def expected_hidden(params: Any, is_token: Array = IS_TOKEN) -> Array:  # [B, T, D]
    """Compute word + position + type, a norm, then one post-norm layer that sees all but
    padding.
    """
    x = params["embedding"][TOKENS] + params["positions"][None, :T] + params["types"][TYPES]
    x = expected_norm(x, params["embedding_norm"])
    w = jax.tree.map(lambda leaf: leaf[0], params["layers"]["place_0"])
    visible = is_token[:, :, None] & is_token[:, None, :]
    x = expected_norm(x + formulas.attention(x, x, w["mixer"], visible)[0], w["mixer_norm"])
    feed_forward_out = formulas.feed_forward(x, w["feed_forward"], "gelu")
    return expected_norm(x + feed_forward_out, w["feed_forward_norm"])


def test_classifier_reads_the_first_token() -> None:
    _, params = make_model(FIRST)
    x = expected_hidden(params)[:, 0]
    assert_close(apply_model(FIRST).logits, x @ params["head"] + params["head_bias"])


def test_last_token_is_the_last_that_is_no_padding() -> None:
    _, params = make_model(LAST)
    assert "head_bias" not in params
    x = expected_hidden(params)[np.arange(3), [4, 2, 1]]
    assert_close(apply_model(LAST).logits, x @ params["head"])


@pytest.mark.parametrize(
    "is_token", [IS_TOKEN, IS_TOKEN & (np.arange(T) != 1)], ids=["padding", "gaps"]
)
@pytest.mark.parametrize("model", [MEAN, MAX], ids=["mean", "max"])
def test_pooling_excludes_segment_0(model: Classifier, is_token: Array) -> None:
    """Also between other tokens, as word dropout creates them."""
    _, params = make_model(model)
    pool = np.mean if model.pooling == "mean" else np.max
    rows = zip(expected_hidden(params, is_token), is_token, strict=True)
    pooled = np.stack([pool(row[kept], axis=0) for row, kept in rows])
    logits = apply_model(model, segments=is_token.astype(np.int32)).logits
    assert_close(logits, pooled @ params["head"] + params["head_bias"])


@pytest.mark.parametrize("model", [MEAN, MAX], ids=["mean", "max"])
def test_pooling_of_padding_alone_is_zero(model: Classifier) -> None:
    _, params = make_model(model)
    logits = apply_model(model, segments=np.zeros_like(SEGMENTS)).logits
    assert_close(logits, np.broadcast_to(params["head_bias"], logits.shape))


def test_pooler_is_linear_and_tanh() -> None:
    _, params = make_model(TANH)
    pooled = np.tanh(expected_hidden(params)[:, 0] @ params["pooler"] + params["pooler_bias"])
    assert_close(apply_model(TANH).logits, pooled @ params["head"] + params["head_bias"])


@pytest.mark.parametrize("kind", [Classifier, Tagger])
def test_pooler_layer_has_an_activation_and_a_norm(kind: Any) -> None:
    layer = PoolerConfig("relu", bias=False, norm=NormConfig(epsilon=EPSILON))
    model = kind(dataclasses.replace(POOLED, pooler_layer=layer), num_classes=C)
    _, params = make_model(model)
    x = np.maximum(expected_hidden(params) @ params["pooler"], 0)
    logits = expected_norm(x, params["pooler_norm"]) @ params["head"] + params["head_bias"]
    found = np.asarray(apply_model(model).logits)
    if kind is Classifier:
        assert_close(found, logits[:, 0])
    else:
        assert_close(found[IS_TOKEN], logits[IS_TOKEN])


def test_tagger_reads_each_token() -> None:
    _, params = make_model(TAGGER)
    x = expected_hidden(params)
    out = apply_model(TAGGER)
    assert_close(np.asarray(out.hidden)[IS_TOKEN], x[IS_TOKEN])
    assert_close(
        np.asarray(out.logits)[IS_TOKEN], (x @ params["head"] + params["head_bias"])[IS_TOKEN]
    )


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_masked_lm_head_matches_formula(
    config: TransformerConfig,
) -> None:
    model = MaskedLanguageModel(config)
    _, params = make_model(model)
    x = formulas.ACTIVATIONS["gelu"](expected_hidden(params) @ params["head"] + params["head_bias"])
    x = expected_norm(x, params["head_norm"])
    matrix = params["embedding"].T if config.tie_embeddings else params["output"]
    logits = x @ matrix + params["head_output_bias"]
    out = apply_model(model)
    assert_close(np.asarray(out.hidden)[IS_TOKEN], x[IS_TOKEN])
    assert_close(np.asarray(out.logits)[IS_TOKEN], logits[IS_TOKEN][:, :V])
    assert out.logits.shape == (*TOKENS.shape, V)


@pytest.mark.parametrize("tied", [True, False])
def test_narrow_embeddings_are_projected_to_the_width(tied: bool) -> None:
    """Lan et al. 2020, section 3.1: the norm is of the narrow sum, and the head ends with E."""
    width = 4
    config = dataclasses.replace(CONFIG, embedding_dim=width, tie_embeddings=tied, num_layers=1)
    model = MaskedLanguageModel(config)
    _, params = make_model(model)
    assert params["embedding"].shape == (ROWS, width)
    assert params["embedding_projection"].shape == (width, D)
    if not tied:
        assert params["output"].shape == (width, ROWS)
    x = params["embedding"][TOKENS] + params["positions"][None, :T] + params["types"][TYPES]
    x = expected_norm(x, params["embedding_norm"])
    x = x @ params["embedding_projection"] + params["embedding_projection_bias"]
    entering = apply_model(model, outputs=frozenset({"residual_pre", "logits"}))
    assert_close(layer_values(entering, "residual_pre")[0], x)
    assert entering.hidden.shape == (*TOKENS.shape, width)
    matrix = params["embedding"].T if tied else params["output"]
    logits = np.asarray(entering.hidden) @ matrix + params["head_output_bias"]
    assert_close(np.asarray(entering.logits), logits[..., :V])


def test_vocabulary_logits_are_computed_on_request() -> None:
    out = apply_model(MASKED, outputs=frozenset())
    assert out.logits is None
    assert_close(out.hidden, apply_model(MASKED).hidden)


@pytest.mark.parametrize("model", [MEAN, MASKED], ids=["mean", "masked"])
def test_padding_tokens_do_not_affect_outputs(model: Model) -> None:
    before = np.asarray(apply_model(model).logits)
    after = np.asarray(apply_model(model, np.where(IS_TOKEN, TOKENS, (TOKENS + 1) % V)).logits)
    rows: Any = IS_TOKEN if before.ndim == 3 else ...
    assert np.array_equal(after[rows], before[rows])


@pytest.mark.parametrize("kind", [Classifier, Tagger])
def test_head_dropout_uses_the_rngs_of_each_example(kind: Any) -> None:
    """An identity head shows its input under dropout: zeros, or doubled values."""
    model = kind(CONFIG, num_classes=D, head_dropout=0.5)
    run, params = make_model(model)
    params = params | {"head": np.eye(D, dtype=np.float32), "head_bias": np.zeros(D, np.float32)}
    keys = jax.random.split(jax.random.key(0), len(TOKENS))
    logits = np.asarray(run({"params": params}, TOKENS, dropout_rngs=keys).logits)
    full = run({"params": params}, TOKENS).logits
    assert_close(logits, np.where(logits == 0, 0, 2 * full))
    assert 0.2 < (logits == 0).mean() < 0.8
    reversed_batch = run({"params": params}, TOKENS[::-1], dropout_rngs=keys[::-1]).logits
    assert np.array_equal(reversed_batch[::-1], logits)


def test_logical_axes_of_heads() -> None:
    assert TAGGER.logical_axes()["head"].names == ("embed", "classes")
    assert FIRST.logical_axes()["head_bias"].names == ("classes",)
    axes = MASKED.logical_axes()
    assert axes["head"].is_matrix
    assert axes["head_output_bias"].names == ("vocab",)
    assert axes["types"].names == ("types", "embed")


def test_invalid_heads_and_inputs_raise() -> None:
    with pytest.raises(ValueError, match="num_classes 0"):
        Classifier(CONFIG, num_classes=0)
    with pytest.raises(ValueError, match="num_classes -1"):
        Tagger(CONFIG, num_classes=-1)
    with pytest.raises(ValueError, match="pooling median"):
        Classifier(CONFIG, pooling="median")  # type: ignore[arg-type]
    for model in (FIRST, TAGGER, MASKED):
        with pytest.raises(ValueError, match="8 tokens: the table of learned positions has 7 rows"):
            jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, T + 3), int))


def test_types_of_tokens_that_the_model_has_not_raise() -> None:
    _, params = make_model(TAGGER)
    with pytest.raises(ValueError, match=r"^token_types: must be at least 0 and below 2"):
        TAGGER.apply({"params": params}, TOKENS, token_types=TYPES + 1)
    without = Tagger(dataclasses.replace(CONFIG, num_token_types=0), num_classes=C)
    params = without.init_params(jax.random.key(0))
    without.apply({"params": params}, TOKENS, token_types=np.zeros_like(TOKENS))
    with pytest.raises(ValueError, match="token_types: must be at least 0 and below 1"):
        without.apply({"params": params}, TOKENS, token_types=np.ones_like(TOKENS))
