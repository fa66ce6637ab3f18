"""The non-autoregressive decoder: its outputs, and its limits."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.transformer.formulas import array, assert_close, random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    Initialization,
    LearnedPositions,
    Model,
    TransformerConfig,
)
from transformer.baselines.nonautoregressive import (
    NonAutoregressive,
    copy_source_uniformly,
    length_loss,
    predict_lengths,
    translate_nonautoregressive,
)
from transformer.parameter_counts import count_parameters

B, S, T, V, D, R = 2, 5, 7, 13, 12, 3
BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=3), feed_forward=FeedForwardConfig(11, activation="relu")
)
CONFIG = TransformerConfig(
    vocab_size=V,
    pad_vocab_to_multiple=1,
    d_model=D,
    num_layers=1,
    layer_pattern=(dataclasses.replace(BLOCK, cross_attention=AttentionConfig(num_heads=2)),),
    position_embedding=LearnedPositions(17),
    causal=False,
    encoder=EncoderConfig(num_layers=1, layer_pattern=(BLOCK,)),
)
MODEL = NonAutoregressive(CONFIG, max_length_difference=R)
SOURCE = array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
IS_TOKEN = array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
WRITTEN = array([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
COPIED = array([[3, 1, 1, 0, 0, 0, 0], [9, 9, 9, 2, 2, 6, 6]])


@pytest.fixture(scope="module")
def params() -> Any:
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), *MODEL.example_inputs())["params"]
    return random_params_like(shapes)


@functools.partial(jax.jit, static_argnames="outputs")
def run(params: Any, tokens: Any, outputs: frozenset[str] = frozenset({"logits"})) -> Any:
    kwargs = dict(source_segments=IS_TOKEN, segments=WRITTEN)
    return MODEL.apply({"params": params}, SOURCE, tokens, outputs=outputs, **kwargs)


def test_source_tokens_are_copied_evenly() -> None:
    copy = jax.jit(copy_source_uniformly)
    actual = np.asarray(copy(SOURCE, array([5, 3]), array([3, 7]), WRITTEN))
    assert np.array_equal(actual * WRITTEN, COPIED)
    assert np.isin(actual, SOURCE).all()  # at padding too, as each is looked up in the embedding


@pytest.mark.full
def test_matches_bidirectional_decoder_on_copied_inputs(params: Any) -> None:
    both = EncoderDecoder(CONFIG)
    same = {name: each for name, each in params.items() if not name.startswith("length")}
    actual = copy_source_uniformly(SOURCE, array([5, 3]), array([3, 7]), WRITTEN)
    kwargs = dict(source_segments=IS_TOKEN, segments=jnp.ones_like(actual))
    expected = jax.jit(both.apply)(
        {"params": same}, SOURCE[1:], actual[1:], **jax.tree.map(lambda each: each[1:], kwargs)
    ).logits
    assert_close(run(params, WRITTEN).logits[1:], expected, 1e-4)


def test_outputs_do_not_depend_on_target_tokens(params: Any) -> None:
    one, other = (np.asarray(run(params, tokens).logits) for tokens in (0 * WRITTEN, 5 * WRITTEN))
    assert np.array_equal(one, other)


def test_length_loss_is_cross_entropy_of_the_difference(params: Any) -> None:
    aux = run(params, WRITTEN, outputs=frozenset({"losses"})).aux
    lengths = jax.jit(
        lambda params: MODEL.apply({"params": params}, SOURCE, None, source_segments=IS_TOKEN)
    )
    logits = np.asarray(lengths(params).logits, np.float64)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -math.log(probs[0, R - 2]) - math.log(probs[1, 2 * R])  # -2, and 4 counts as 3
    assert aux[-1]["loss/length"] == pytest.approx(0.1 * expected / 2, rel=1e-4)


def test_rows_without_target_have_no_length_loss() -> None:
    logits = array([[0.0, 1.0, 0.0], [7.0, -5.0, 3.0]])
    actual = jax.jit(length_loss)(logits, IS_TOKEN, array([[1] * 5, [0] * 5]))
    assert actual == pytest.approx(math.log(2 + math.e) - 1, rel=1e-6)
    assert predict_lengths(array([[0, 0, 1], [1, 0, 0], [1, 0, 0]]), array([5, 3, 1])).tolist() == [
        6,
        2,
        1,
    ]


@pytest.mark.full
def test_translation_takes_the_likeliest_length_and_tokens(params: Any) -> None:
    sources = [[3, 1, 4, 1, 5], [9, 2, 6]]
    actual = translate_nonautoregressive(MODEL, params, sources, stop=V, batch_size=2)
    apply = jax.jit(MODEL.apply)
    for source, words in zip(sources, actual, strict=True):
        row = array([source])
        logits = apply({"params": params}, row, None).logits
        [length] = np.asarray(predict_lengths(logits, array([len(source)])))
        full = apply({"params": params}, row, np.zeros((1, length), int)).logits
        assert words == np.asarray(full)[0].argmax(-1).tolist()
    stop = actual[0][-1]
    [ended] = translate_nonautoregressive(MODEL, params, sources[:1], stop=stop, batch_size=2)
    assert ended == actual[0][: actual[0].index(stop)]


def test_parameter_names() -> None:
    shared = count_parameters(EncoderDecoder(CONFIG)).total
    assert count_parameters(MODEL).total == shared + (D + 1) * (2 * R + 1)


def test_invalid_configs_and_calls_raise() -> None:
    with pytest.raises(ValueError, match="causal True: a non-autoregressive model predicts"):
        NonAutoregressive(dataclasses.replace(CONFIG, causal=True))
    with pytest.raises(ValueError, match="encoder: is missing"):
        NonAutoregressive(dataclasses.replace(CONFIG, encoder=None))
    with pytest.raises(ValueError, match="source 1: is empty"):
        translate_nonautoregressive(MODEL, {}, [[1], []], stop=0)


@pytest.mark.full
def test_parallel_predictions_cannot_agree() -> None:
    """A source means `1 2` or `2 1` with equal probability, so the second token follows from the
    first.

    An autoregressive model reaches log 2 nats a sentence; two independent predictions cost twice
    that.
    """
    start = Initialization(std=0.0, embedding_std=1.0)
    config = dataclasses.replace(CONFIG, initialization=start)
    autoregressive = train_model(EncoderDecoder(dataclasses.replace(config, causal=True)))
    parallel = train_model(NonAutoregressive(config))
    assert autoregressive == pytest.approx(math.log(2), abs=0.02)
    assert parallel == pytest.approx(2 * math.log(2), abs=0.02)


def train_model(model: Model, steps: int = 150) -> float:
    """Return the loss per sentence after training, in nats."""
    source, targets = array([[7], [7]]), array([[1, 2], [2, 1]])
    read = array([[0, 1], [0, 2]])  # the previous tokens
    params = jax.jit(model.init)(jax.random.key(0), source, read)["params"]
    adam = optax.adam(0.01)

    def loss(params: Any) -> jax.Array:
        logits = model.apply({"params": params}, source, read).logits
        assert logits is not None
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.sum(jnp.take_along_axis(log_probs, targets[..., None], axis=-1)) / len(source)

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        actual, gradient = jax.value_and_grad(loss)(params)
        updates, state = adam.update(gradient, state)
        return (optax.apply_updates(params, updates), state), actual

    run = jax.jit(lambda params: jax.lax.scan(step, (params, adam.init(params)), None, steps))
    return float(run(params)[1][-1])
