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

from tests.transformer.formulas import array, assert_close, weights_of
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
THERE = array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
WRITTEN = array([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
COPIED = array([[3, 1, 1, 0, 0, 0, 0], [9, 9, 9, 2, 2, 6, 6]])


@pytest.fixture(scope="module")
def params() -> Any:
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), *MODEL.example_inputs())["params"]
    return weights_of(shapes)


@functools.partial(jax.jit, static_argnames="outputs")
def run(params: Any, tokens: Any, outputs: frozenset[str] = frozenset({"logits"})) -> Any:
    given = dict(source_segments=THERE, segments=WRITTEN)
    return MODEL.apply({"params": params}, SOURCE, tokens, outputs=outputs, **given)


def test_the_words_of_the_source_are_spread_evenly() -> None:
    found = np.asarray(copy_source_uniformly(SOURCE, array([5, 3]), array([3, 7]), WRITTEN))
    assert np.array_equal(found * WRITTEN, COPIED)


@pytest.mark.slow
def test_it_is_a_decoder_without_a_causal_mask_that_reads_copies(params: Any) -> None:
    both = EncoderDecoder(CONFIG)
    same = {name: each for name, each in params.items() if not name.startswith("length")}
    found = copy_source_uniformly(SOURCE, array([5, 3]), array([3, 7]), WRITTEN)
    given = dict(source_segments=THERE, segments=jnp.ones_like(found))
    expected = jax.jit(both.apply)(
        {"params": same}, SOURCE[1:], found[1:], **jax.tree.map(lambda each: each[1:], given)
    ).logits
    assert_close(run(params, WRITTEN).logits[1:], expected, 1e-4)


def test_no_word_knows_another(params: Any) -> None:
    one, other = (np.asarray(run(params, tokens).logits) for tokens in (0 * WRITTEN, 5 * WRITTEN))
    assert np.array_equal(one, other)


def test_the_loss_of_lengths_is_that_of_the_difference(params: Any) -> None:
    aux = run(params, WRITTEN, outputs=frozenset({"losses"})).aux
    lengths = jax.jit(
        lambda params: MODEL.apply({"params": params}, SOURCE, None, source_segments=THERE)
    )
    logits = np.asarray(lengths(params).logits, np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -math.log(chances[0, R - 2]) - math.log(chances[1, 2 * R])  # -2, and 4 counts as 3
    assert aux[-1]["loss/length"] == pytest.approx(0.1 * expected / 2, rel=1e-4)


def test_rows_without_a_target_have_no_length() -> None:
    logits = array([[0.0, 1.0, 0.0], [7.0, -5.0, 3.0]])
    found = length_loss(logits, THERE, array([[1] * 5, [0] * 5]))
    assert found == pytest.approx(math.log(2 + math.e) - 1, rel=1e-6)
    assert predict_lengths(array([[0, 0, 1], [1, 0, 0], [1, 0, 0]]), array([5, 3, 1])).tolist() == [
        6,
        2,
        1,
    ]


@pytest.mark.slow
def test_a_translation_is_the_likeliest_length_and_then_the_likeliest_words(params: Any) -> None:
    sources = [[3, 1, 4, 1, 5], [9, 2, 6]]
    found = translate_nonautoregressive(MODEL, params, sources, stop=V, batch_size=2)
    apply = jax.jit(MODEL.apply)
    for source, words in zip(sources, found, strict=True):
        row = array([source])
        logits = apply({"params": params}, row, None).logits
        [length] = np.asarray(predict_lengths(logits, array([len(source)])))
        whole = apply({"params": params}, row, np.zeros((1, length), int)).logits
        assert words == np.asarray(whole)[0].argmax(-1).tolist()
    stop = found[0][-1]
    [ended] = translate_nonautoregressive(MODEL, params, sources[:1], stop=stop, batch_size=2)
    assert ended == found[0][: found[0].index(stop)]


def test_parameters() -> None:
    shared = count_parameters(EncoderDecoder(CONFIG)).total
    assert count_parameters(MODEL).total == shared + (D + 1) * (2 * R + 1)


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"^model.causal True: a non-autoregressive model predicts"
    ):
        NonAutoregressive(dataclasses.replace(CONFIG, causal=True))
    with pytest.raises(ValueError, match=r"^model.encoder: is missing; give an EncoderConfig$"):
        NonAutoregressive(dataclasses.replace(CONFIG, encoder=None))
    with pytest.raises(ValueError, match=r"^source 1: is empty; give it at least one token$"):
        translate_nonautoregressive(MODEL, {}, [[1], []], stop=0)


@pytest.mark.full
def test_words_written_at_once_cannot_agree() -> None:
    """If a source means `1 2` half of the time and else `2 1`, the second token follows from the
    first: log 2 nats a sentence. Two tokens predicted independently cost twice that.
    """
    start = Initialization(std=0.0, embedding_std=1.0)
    config = dataclasses.replace(CONFIG, initialization=start)
    one_by_one = trained(EncoderDecoder(dataclasses.replace(config, causal=True)))
    at_once = trained(NonAutoregressive(config))
    assert one_by_one == pytest.approx(math.log(2), abs=0.02)
    assert at_once == pytest.approx(2 * math.log(2), abs=0.02)


def trained(model: Model, steps: int = 150) -> float:
    """The loss of a sentence, in nats."""
    source, targets = array([[7], [7]]), array([[1, 2], [2, 1]])
    read = array([[0, 1], [0, 2]])  # what comes before each word
    params = jax.jit(model.init)(jax.random.key(0), source, read)["params"]
    adam = optax.adam(0.01)

    def loss(params: Any) -> jax.Array:
        logits = model.apply({"params": params}, source, read).logits
        assert logits is not None
        chances = jax.nn.log_softmax(logits)
        return -jnp.sum(jnp.take_along_axis(chances, targets[..., None], axis=-1)) / len(source)

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        found, gradient = jax.value_and_grad(loss)(params)
        updates, state = adam.update(gradient, state)
        return (optax.apply_updates(params, updates), state), found

    run = jax.jit(lambda params: jax.lax.scan(step, (params, adam.init(params)), None, steps))
    return float(run(params)[1][-1])
