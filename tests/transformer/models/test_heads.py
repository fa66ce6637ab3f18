"""The classifier, the tagger and the masked language model, each by hand from its formula."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer import formulas
from tests.transformer.formulas import Array, array, assert_close, layer_norm, weights_of
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
SEEN = SEGMENTS == 1

FIRST, MEAN, MAX = (
    Classifier(CONFIG, num_classes=C, pooling="first"),
    Classifier(CONFIG, num_classes=C, pooling="mean"),
    Classifier(CONFIG, num_classes=C, pooling="max"),
)
TANH = Classifier(POOLED, num_classes=C)
TAGGER, MASKED = Tagger(CONFIG, num_classes=C), MaskedLanguageModel(CONFIG)
every = pytest.mark.parametrize(
    "model", [FIRST, MEAN, TANH, TAGGER, MASKED], ids=["first", "mean", "pooler", "tags", "masked"]
)


@functools.cache
def made(model: Model) -> tuple[Any, Any]:
    """The model as a compiled function, and random parameters for it."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *model.example_inputs())["params"]
    return jax.jit(model.apply, static_argnames="outputs"), weights_of(shapes)


def applied(model: Model, tokens: Array = TOKENS, **given: Any) -> Any:
    run, params = made(model)
    return run({"params": params}, tokens, **(dict(segments=SEGMENTS, token_types=TYPES) | given))


def normed(x: Array, norm: dict[str, Array]) -> Array:
    return layer_norm(x, norm["gain"], norm["bias"], EPSILON)


def hidden(params: Any, is_token: Array = SEEN) -> Array:  # [B, T, D]
    """Word + position + type, a norm, then one post-norm layer that sees all but padding."""
    x = params["embedding"][TOKENS] + params["positions"][None, :T] + params["types"][TYPES]
    x = normed(x, params["embedding_norm"])
    w = jax.tree.map(lambda leaf: leaf[0], params["layers"]["place_0"])
    seen = is_token[:, :, None] & is_token[:, None, :]
    x = normed(x + formulas.attention(x, x, w["mixer"], seen)[0], w["mixer_norm"])
    fed = formulas.feed_forward(x, w["feed_forward"], "gelu")
    return normed(x + fed, w["feed_forward_norm"])


def test_a_classifier_reads_the_first_token() -> None:
    _, params = made(FIRST)
    x = hidden(params)[:, 0]
    assert_close(applied(FIRST).logits, x @ params["head"] + params["head_bias"])


@pytest.mark.parametrize("is_token", [SEEN, SEEN & (np.arange(T) != 1)], ids=["padding", "gaps"])
@pytest.mark.parametrize("model", [MEAN, MAX], ids=["mean", "max"])
def test_pooling_leaves_out_tokens_of_segment_0(model: Classifier, is_token: Array) -> None:
    """Also between others, as word dropout has them."""
    _, params = made(model)
    pool = np.mean if model.pooling == "mean" else np.max
    rows = zip(hidden(params, is_token), is_token, strict=True)
    pooled = np.stack([pool(row[kept], axis=0) for row, kept in rows])
    logits = applied(model, segments=is_token.astype(np.int32)).logits
    assert_close(logits, pooled @ params["head"] + params["head_bias"])


@pytest.mark.parametrize("model", [MEAN, MAX], ids=["mean", "max"])
def test_pooling_of_padding_alone_is_zero(model: Classifier) -> None:
    _, params = made(model)
    logits = applied(model, segments=np.zeros_like(SEGMENTS)).logits
    assert_close(logits, np.broadcast_to(params["head_bias"], logits.shape))


def test_a_pooler_is_a_linear_map_and_tanh() -> None:
    _, params = made(TANH)
    pooled = np.tanh(hidden(params)[:, 0] @ params["pooler"] + params["pooler_bias"])
    assert_close(applied(TANH).logits, pooled @ params["head"] + params["head_bias"])


def test_a_tagger_reads_each_token() -> None:
    _, params = made(TAGGER)
    x = hidden(params)
    out = applied(TAGGER)
    assert_close(np.asarray(out.hidden)[SEEN], x[SEEN])
    assert_close(np.asarray(out.logits)[SEEN], (x @ params["head"] + params["head_bias"])[SEEN])


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_a_masked_language_model_has_a_layer_of_its_own_before_the_words(
    config: TransformerConfig,
) -> None:
    model = MaskedLanguageModel(config)
    _, params = made(model)
    x = formulas.ACTIVATIONS["gelu"](hidden(params) @ params["head"] + params["head_bias"])
    x = normed(x, params["head_norm"])
    matrix = params["embedding"].T if config.tie_embeddings else params["output"]
    logits = x @ matrix + params["head_output_bias"]
    out = applied(model)
    assert_close(np.asarray(out.hidden)[SEEN], x[SEEN])
    assert_close(np.asarray(out.logits)[SEEN], logits[SEEN][:, :V])
    assert out.logits.shape == (*TOKENS.shape, V)


def test_logits_of_words_come_only_when_wanted() -> None:
    out = applied(MASKED, outputs=frozenset())
    assert out.logits is None
    assert_close(out.hidden, applied(MASKED).hidden)


@every
def test_what_stands_in_padding_is_invisible(model: Model) -> None:
    before = np.asarray(applied(model).logits)
    after = np.asarray(applied(model, np.where(SEEN, TOKENS, (TOKENS + 1) % V)).logits)
    rows: Any = SEEN if before.ndim == 3 else ...
    assert np.array_equal(after[rows], before[rows])


@every
def test_every_token_is_seen_before_and_behind(model: Model) -> None:
    before = np.asarray(applied(model).hidden)
    for changed in (0, 4):
        other = TOKENS.copy()
        other[0, changed] = (other[0, changed] + 1) % V
        after = np.asarray(applied(model, other).hidden)
        assert np.all(np.any(after[0] != before[0], axis=-1))
        assert np.array_equal(after[1:][SEEN[1:]], before[1:][SEEN[1:]])


def test_a_row_of_padding_alone_has_the_logits_of_the_bias() -> None:
    _, params = made(MEAN)
    logits = applied(MEAN, segments=np.zeros_like(SEGMENTS)).logits
    assert_close(logits, np.tile(params["head_bias"], (len(TOKENS), 1)))


@pytest.mark.parametrize("kind", [Classifier, Tagger])
def test_heads_drop_entries_by_the_keys_of_their_examples(kind: Any) -> None:
    """An identity head shows its input under dropout: zeros, or doubled values."""
    model = kind(CONFIG, num_classes=D, head_dropout=0.5)
    run, params = made(model)
    params = params | {"head": np.eye(D, dtype=np.float32), "head_bias": np.zeros(D, np.float32)}
    keys = jax.random.split(jax.random.key(0), len(TOKENS))
    logits = np.asarray(run({"params": params}, TOKENS, dropout_rngs=keys).logits)
    whole = run({"params": params}, TOKENS).logits
    assert_close(logits, np.where(logits == 0, 0, 2 * whole))
    assert 0.2 < (logits == 0).mean() < 0.8
    turned = run({"params": params}, TOKENS[::-1], dropout_rngs=keys[::-1]).logits
    assert np.array_equal(turned[::-1], logits)


def test_axes_of_the_heads() -> None:
    assert TAGGER.logical_axes()["head"].names == ("embed", "classes")
    assert FIRST.logical_axes()["head_bias"].names == ("classes",)
    axes = MASKED.logical_axes()
    assert axes["head"].is_matrix
    assert axes["head_output_bias"].names == ("vocab",)
    assert axes["types"].names == ("types", "embed")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Classifier(CONFIG, num_classes=0), "num_classes 0: give 1 or more$"),
        (lambda: Tagger(CONFIG, num_classes=-1), "num_classes -1: give 1 or more$"),
        (
            lambda: Classifier(CONFIG, pooling="last"),  # type: ignore[arg-type]
            "pooling last: is not known; give one of first, mean, max$",
        ),
    ],
    ids=["no classes", "fewer tags", "pooling"],
)
def test_heads_that_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        build()


@every
def test_inputs_beyond_the_table_of_positions_are_refused(model: Model) -> None:
    tokens = np.zeros((1, T + 3), int)
    with pytest.raises(ValueError, match=r"^8 tokens: the table of learned positions has 7 rows;"):
        model.init(jax.random.key(0), tokens)
