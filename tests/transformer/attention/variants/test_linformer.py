"""Linformer against dense matrices: a padded matrix of its own for every document."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, assert_trees_close, normal
from tests.transformer.mixers import applied, axes, made
from transformer import (
    BlockConfig,
    Classifier,
    LanguageModel,
    LinformerConfig,
    Mask,
    MaskPattern,
    TransformerConfig,
)
from transformer.attention.mixer import MixerInputs
from transformer.costs import count_token_flops

B, T, S, D, N, K, H, R = 2, 11, 9, 6, 4, 2, 3, 5
LENGTH = 13


def config(**given: Any) -> LinformerConfig:
    usual: Any = dict(
        num_heads=N, num_kv_heads=K, head_dim=H, max_length=LENGTH, rank=R, bias=False
    )
    return LinformerConfig(**usual | given)


def seen_and_places(mask: Mask, queries: int, keys: int) -> tuple[Array, Array]:
    """Return the visible keys [B, T, S], and each key's place in its document [B, S]."""
    there = (
        np.arange(keys)
        < (np.full(B, keys) if mask.key_lengths is None else mask.key_lengths)[:, None]
    )
    if mask.segments is None:
        return there[:, None].repeat(queries, 1), np.arange(keys)[None].repeat(B, 0)
    ours = np.asarray(mask.segments)
    theirs = np.where(there, ours if mask.key_segments is None else mask.key_segments, 0)
    places = np.array([[t - list(row).index(row[t]) for t in range(keys)] for row in theirs])
    return (ours[:, :, None] == theirs[:, None]) & (theirs[:, None] != 0), places


def by_matrices(mask: Mask, x: Any, memory: Any, w: Any, xp: Any = np) -> Any:
    """The formula, query by query: its keys alone are projected, by the rows of their places."""
    e, f = w["key_rows"], w.get("value_rows", w["key_rows"])
    e, f = (xp.broadcast_to(table, (K, LENGTH, R)) for table in (e, f))
    q = xp.einsum("BTD,DNH->BTNH", x, w["query"])
    k, v = (xp.einsum("BSD,DKH->BSKH", memory, w[name]) for name in ("key", "value"))
    seen, places = seen_and_places(mask, x.shape[1], memory.shape[1])
    rows = seen[:, :, None, :, None] * e[:, places].swapaxes(0, 1)[:, None]  # [B, T, K, S, R]
    keys = xp.einsum("BTKSR,BSKH->BTKRH", rows, k)
    rows = seen[:, :, None, :, None] * f[:, places].swapaxes(0, 1)[:, None]
    values = xp.einsum("BTKSR,BSKH->BTKRH", rows, v)
    keys, values = (xp.repeat(each, N // K, axis=2) for each in (keys, values))
    scores = xp.exp(xp.einsum("BTNH,BTNRH->BTNR", q, keys) / H**0.5)
    y = xp.einsum("BTNR,BTNRH->BTNH", scores / scores.sum(-1)[..., None], values)
    return xp.einsum("BTNH,NHD->BTD", y, w["output"])


SEGMENTS = array([[4, 4, 4, 4, 4, 4, 2, 2, 2, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]])
OTHERS = array([[2, 2, 2, 0, 4, 4, 4, 4, 4], [1, 0, 0, 0, 0, 0, 0, 0, 0]])
CASES = [
    (dict(sharing="heads"), Mask(), T),
    (dict(sharing="none"), Mask(segments=SEGMENTS), T),
    (dict(sharing="key_value"), Mask(key_lengths=array([10, 1])), T),
    (dict(sharing="heads"), Mask(segments=SEGMENTS, key_segments=OTHERS), S),
    (dict(max_documents=1), Mask(key_lengths=array([3, 11])), T),
]


@pytest.mark.parametrize(("given", "mask", "keys"), CASES, ids=range(len(CASES)))
def test_values_and_gradients(given: Any, mask: Mask, keys: int) -> None:
    mixer, w = made(config(**given), D)
    x, other = normal(0, B, T, D), normal(1, B, keys, D)
    memory = None if keys == T else other
    positions = np.arange(T)[None]

    def ours(w: Any, x: Any, other: Any) -> Any:
        memory = None if keys == T else other
        output: Any = mixer.apply(
            {"params": w}, x, MixerInputs(array(positions), mask, memory=memory)
        )
        return output.y

    def theirs(w: Any, x: Any, other: Any, xp: Any = jnp) -> Any:
        return by_matrices(mask, x, x if keys == T else other, w, xp)

    def pulled(f: Any, *given: Any) -> Any:
        y, pull = jax.vjp(f, *given)
        return y, pull(normal(2, B, T, D))

    y, gradients = jax.jit(functools.partial(pulled, ours))(w, x, other)
    assert_close(y, theirs(jax.tree.map(np.float64, w), np.float64(x), np.float64(other), np))
    expected = jax.jit(functools.partial(pulled, theirs))(w, x, other)[1]
    assert_trees_close(gradients, expected)
    assert memory is None or np.any(gradients[2])


def test_weights_and_their_axes() -> None:
    shapes = {}
    for sharing in ("none", "heads", "key_value"):
        _, w = made(config(sharing=sharing), D)
        shapes[sharing] = {name: w[name].shape for name in w if name.endswith("rows")}
    assert shapes["none"] == dict.fromkeys(("key_rows", "value_rows"), (K, LENGTH, R))
    assert shapes["heads"] == dict.fromkeys(("key_rows", "value_rows"), (LENGTH, R))
    assert shapes["key_value"] == {"key_rows": (LENGTH, R)}
    assert axes(config(sharing="none"), D)["key_rows"] == ("kv_heads", "positions", "rank")


@pytest.mark.slow
def test_each_document_of_a_pack_is_as_if_alone_and_too_many_are_not_a_number() -> None:
    mixer, w = made(config(), D)
    x = normal(0, B, T, D)
    y = applied(mixer, w, x, mask=Mask(segments=SEGMENTS)).y
    for row, tokens in ((0, slice(0, 6)), (0, slice(6, 9)), (1, slice(0, 4))):
        assert_close(y[row, tokens], applied(mixer, w, x[:, tokens]).y[row])
    three = np.where(np.arange(T) == 10, [[3], [0]], SEGMENTS)
    y = applied(mixer, w, x, mask=Mask(segments=array(three))).y
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


@pytest.mark.slow
def test_a_classifier_pads() -> None:
    block = BlockConfig(mixer=config(max_documents=2))
    model = Classifier(
        TransformerConfig(
            vocab_size=17, d_model=D, num_layers=1, layer_pattern=(block,), causal=False
        ),
        pooling="mean",
    )
    tokens = array(np.arange(8)[None])
    params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
    run = jax.jit(
        lambda tokens, segments: model.apply({"params": params}, tokens, segments=segments)
    )
    whole = run(tokens, np.ones((1, 8), int)).logits
    padded = np.concatenate([tokens, [[5, 6]]], axis=1)
    assert_close(run(padded, array([[1] * 8 + [0] * 2])).logits, whole)


def test_costs() -> None:
    block = BlockConfig(mixer=config(sharing="none"), feed_forward=None)
    model = LanguageModel(
        TransformerConfig(
            vocab_size=17, d_model=D, num_layers=1, layer_pattern=(block,), causal=False
        )
    )
    flops = count_token_flops(model, LENGTH)
    assert flops.scores == 2 * (2 * K * H * R + 2 * N * H * R)
    assert flops.projections == 2 * D * H * (2 * N + 2 * K)


def test_errors() -> None:
    mixer, w = made(config(), D)
    x = normal(0, 1, LENGTH + 1, D)
    with pytest.raises(ValueError, match=r"^mixer linformer: 14 tokens are more than the 13 col"):
        applied(mixer, w, x)
    with pytest.raises(ValueError, match=r"^mixer linformer: does not support a causal mask"):
        applied(mixer, w, x[:, :3], mask=Mask(MaskPattern(causal=True)))
    with pytest.raises(ValueError, match=r"^mixer linformer: cannot decode, because each"):
        mixer.init_cache(1, 3)
    alone, _ = made(config(max_documents=1), D)
    with pytest.raises(ValueError, match=r"^mixer linformer: max_documents 1 cannot keep"):
        applied(alone, w, x[:, :3], mask=Mask(segments=array([[1, 1, 0]])))
    for name in ("max_length", "rank", "max_documents"):
        with pytest.raises(ValueError, match=rf"^linformer.{name} 0: give 1 or more$"):
            config(**{name: 0})
    with pytest.raises(ValueError, match=r"^linformer.sharing layers: is not known; give one of"):
        config(sharing="layers")
