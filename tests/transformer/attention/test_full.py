"""Full attention against loops written from the formula, with all sizes different."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer import formulas, mixers
from tests.transformer.formulas import Array, array, assert_close, normal
from transformer import AttentionConfig, Mask, MaskPattern, NormConfig, RoPE
from transformer.attention.cache import MemoryCache
from transformer.attention.full import Attention
from transformer.attention.mixer import MixerInputs
from transformer.attention.rope import apply_rope
from transformer.layers.logical_axes import abstract_weights

B, T, S, D = 2, 5, 7, 12
WEIGHTS = frozenset({"weights"})

CASES = {
    "multi-head": AttentionConfig(num_heads=3),
    "grouped-query": AttentionConfig(num_heads=6, num_kv_heads=2),
    "values of their own width": AttentionConfig(
        num_heads=6, num_kv_heads=3, head_dim=13, value_head_dim=7
    ),
    "no biases": AttentionConfig(num_heads=6, num_kv_heads=3, bias=False),
}


rotate = jax.jit(apply_rope, static_argnums=2)
made = functools.partial(mixers.make_mixer, width=D)
applied = functools.partial(mixers.apply_mixer, outputs=WEIGHTS)


@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_self_attention(config: AttentionConfig) -> None:
    mixer, params = made(config)
    x = normal(1, B, T, D)
    output = applied(mixer, params, x, mask=Mask(MaskPattern(causal=True)))
    visible = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    y, weights = formulas.attention(x, x, params, visible)
    assert_close(output.y, y)
    assert_close(output.aux["weights"], weights)
    assert output.cache is None


def test_cross_attention() -> None:
    mixer, params = made(CASES["values of their own width"])
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    lengths: Any = np.array([S, 3])
    output = applied(mixer, params, x, mask=Mask(key_lengths=lengths), memory=memory)
    visible = np.broadcast_to(np.arange(S) < np.array([[[S]], [[3]]]), (B, T, S))
    y, weights = formulas.attention(x, memory, params, visible)
    assert_close(output.y, y)
    assert_close(output.aux["weights"], weights)


def test_rope_rotates_queries_and_keys() -> None:
    rotary = RoPE(theta=100.0, fraction=0.5, layout="interleaved")
    config = AttentionConfig(num_heads=3, head_dim=8, bias=False, position=rotary)
    mixer, params = made(config)
    x = normal(1, B, T, D)
    positions: Any = np.array([[3, 4, 5, 6, 7], [0, 1, 2, 3, 4]])
    output = applied(mixer, params, x, mask=Mask(), positions=positions)

    def rotated(name: str) -> Array:  # [B, T, N, H]
        heads: Any = np.einsum("BTD,DNH->BTNH", x, params[name])
        return np.asarray(rotate(heads, positions, rotary))

    scores = np.einsum("BTNH,BSNH->BNTS", rotated("query"), rotated("key")) / np.sqrt(8)
    assert_close(output.aux["weights"], np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))


def test_cross_attention_ignores_rope() -> None:
    without_rope = AttentionConfig(num_heads=3, head_dim=8)
    with_rope = dataclasses.replace(without_rope, position=RoPE())
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    _, params = made(without_rope)
    outputs = [
        applied(made(config)[0], params, x, mask=Mask(), memory=memory).y
        for config in (without_rope, with_rope)
    ]
    assert np.array_equal(*outputs)


def test_qk_norm_is_applied_per_head_before_rope() -> None:
    rotary = RoPE(theta=100.0)
    norm = NormConfig("rms", epsilon=1e-3)
    config = AttentionConfig(
        num_heads=6, num_kv_heads=3, head_dim=8, bias=False, position=rotary, qk_norm=norm
    )
    mixer, params = made(config)
    x, positions = normal(1, B, T, D), array([[3, 4, 5, 6, 7]])
    output = applied(mixer, params, x, positions=positions)

    def normed_and_rotated(name: str) -> Array:  # [B, T, N, H]
        heads: Any = np.einsum("BTD,DNH->BTNH", x, params[name])
        normed = formulas.rms_norm(heads, params[f"{name}_norm"]["gain"], 1e-3)
        return np.asarray(rotate(array(normed), positions, rotary))

    q, k = normed_and_rotated("query"), np.repeat(normed_and_rotated("key"), 2, axis=2)
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / np.sqrt(8)
    assert_close(output.aux["weights"], np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))


def test_heads_are_clipped_before_norms_of_their_own() -> None:
    config = AttentionConfig(
        num_heads=6,
        num_kv_heads=3,
        head_dim=8,
        qk_norm=NormConfig(epsilon=1e-3, bias=False),
        qk_norm_heads="separate",
        qkv_clip=0.7,
    )
    mixer, params = made(config)
    assert params["query_norm"]["gain"].shape == (6, 8)
    assert params["key_norm"]["gain"].shape == (3, 8)
    x = normal(1, B, T, D)
    output = applied(mixer, params, x)

    def clipped(name: str) -> Array:  # [B, T, N, H]
        heads = np.einsum("BTD,DNH->BTNH", x, params[name]) + params[f"{name}_bias"]
        return np.clip(heads, -0.7, 0.7)

    def normed(name: str) -> Array:
        gain = params[f"{name}_norm"]["gain"]
        return formulas.layer_norm(clipped(name), gain, 0.0, 1e-3)

    k, v = (np.repeat(each, 2, axis=2) for each in (normed("key"), clipped("value")))
    scores = np.einsum("BTNH,BSNH->BNTS", normed("query"), k) / np.sqrt(8)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert_close(output.aux["weights"], weights)
    y = np.einsum("BNTS,BSNH->BTNH", weights, v)
    assert_close(output.y, np.einsum("BTNH,NHD->BTD", y, params["output"]) + params["output_bias"])


def test_memory_is_projected_once() -> None:
    """Later calls read keys and values from the cache; their matrices are not needed."""
    mixer, params = made(CASES["values of their own width"])
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    kwargs: dict[str, Any] = dict(mask=Mask(key_lengths=array([S, 3])), memory=memory)
    full = applied(mixer, params, x, **kwargs)
    first = applied(mixer, params, x[:, :2], cache=mixer.init_memory_cache(B, S), **kwargs)
    assert isinstance(first.cache, MemoryCache)
    without_kv = {name: w for name, w in params.items() if not name.startswith(("key", "value"))}
    rest = applied(mixer, without_kv, x[:, 2:], cache=first.cache, **kwargs | {"memory": None})
    assert_close(np.concatenate([first.y, rest.y], axis=1), full.y)
    assert np.array_equal(first.cache.keys, rest.cache.keys)


def test_memory_cache_kind_and_size_are_checked() -> None:
    mixer, params = made(CASES["multi-head"])
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    call = functools.partial(applied, mixer, params, x, memory=memory)
    with pytest.raises(ValueError, match="is not one for a memory"):
        call(cache=mixer.init_cache(B, S))
    with pytest.raises(ValueError, match="memory of 2 x 7 tokens: its cache is for 2 x 8"):
        call(cache=mixer.init_memory_cache(B, S + 1))


def test_logical_axes_of_weights() -> None:
    mixer = Attention(CASES["grouped-query"], mixers.make_context(D), parent=None)
    x, positions = normal(0, 1, 1, D), np.zeros((1, 1), int)
    init = lambda key: mixer.init(key, x, MixerInputs(array(positions), Mask()))  # noqa: E731
    _, axes = abstract_weights(init, jax.random.key(0))
    assert {name: weight.names for name, weight in axes.items()} == {
        "query": ("embed", "heads", "head"),
        "query_bias": ("heads", "head"),
        "key": ("embed", "kv_heads", "head"),
        "key_bias": ("kv_heads", "head"),
        "value": ("embed", "kv_heads", "head"),
        "value_bias": ("kv_heads", "head"),
        "output": ("heads", "head", "embed"),
        "output_bias": ("embed",),
    }
    assert {name for name, weight in axes.items() if weight.is_matrix} == {
        "query",
        "key",
        "value",
        "output",
    }
