"""Full attention against loops written from the formula, at sizes of which no two are alike."""

import dataclasses
import functools
from typing import Any, get_args

import jax
import numpy as np
import pytest

from tests.transformer import formulas, mixers
from tests.transformer.formulas import Array, array, assert_close, normal
from transformer import AttentionConfig, Mask, MaskPattern, MixerConfig, NormConfig, RoPE
from transformer.attention.attention_config import Backend
from transformer.attention.cache import MemoryCache
from transformer.attention.full import Attention
from transformer.attention.mixer import MixerInputs, mixer_class
from transformer.attention.rope import apply_rope

B, T, S, D = 2, 5, 7, 12
WEIGHTS = frozenset({"weights"})

CASES = {
    "multi-head": AttentionConfig(num_heads=3),
    "grouped-query": AttentionConfig(num_heads=6, num_kv_heads=2),
    "multi-query": AttentionConfig(num_heads=3, num_kv_heads=1),
    "heads of their own width": AttentionConfig(num_heads=5, head_dim=11),
    "values of their own width": AttentionConfig(
        num_heads=6, num_kv_heads=3, head_dim=13, value_head_dim=7
    ),
    "no biases": AttentionConfig(num_heads=6, num_kv_heads=3, bias=False),
}


made = functools.partial(mixers.made, width=D)
applied = functools.partial(mixers.applied, outputs=WEIGHTS)


@pytest.mark.parametrize("config", CASES.values(), ids=list(CASES))
def test_self_attention(config: AttentionConfig) -> None:
    mixer, params = made(config)
    x = normal(1, B, T, D)
    output = applied(mixer, params, x, mask=Mask(MaskPattern(causal=True)))
    seen = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    y, weights = formulas.attention(x, x, params, seen)
    assert_close(output.y, y)
    assert_close(output.aux["weights"], weights)
    assert output.cache is None


def test_cross_attention() -> None:
    mixer, params = made(CASES["values of their own width"])
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    lengths: Any = np.array([S, 3])
    output = applied(mixer, params, x, mask=Mask(key_lengths=lengths), memory=memory)
    seen = np.broadcast_to(np.arange(S) < np.array([[[S]], [[3]]]), (B, T, S))
    y, weights = formulas.attention(x, memory, params, seen)
    assert_close(output.y, y)
    assert_close(output.aux["weights"], weights)


def test_a_query_that_sees_nothing_gets_the_bias_alone() -> None:
    mixer, params = made(CASES["grouped-query"])
    x = normal(1, B, T, D)
    segments: Any = np.array([[1, 1, 0, 2, 0], [0, 0, 0, 0, 0]])
    output = applied(mixer, params, x, mask=Mask(segments=segments))
    seen = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
    y, weights = formulas.attention(x, x, params, seen)
    assert_close(output.y, y)
    assert_close(output.aux["weights"], weights)
    empty = np.asarray(output.y)[segments == 0]
    assert np.array_equal(empty, np.broadcast_to(params["output_bias"], empty.shape))


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_queries_and_keys_are_turned_by_their_positions(layout: Any) -> None:
    rotary = RoPE(theta=100.0, fraction=0.5, layout=layout)
    config = AttentionConfig(num_heads=3, head_dim=8, bias=False, position=rotary)
    mixer, params = made(config)
    x = normal(1, B, T, D)
    positions: Any = np.array([[3, 4, 5, 6, 7], [0, 1, 2, 3, 4]])
    output = applied(mixer, params, x, mask=Mask(), positions=positions)

    def turned(name: str) -> Array:  # [B, T, N, H]
        heads: Any = np.einsum("BTD,DNH->BTNH", x, params[name])
        return np.asarray(apply_rope(heads, positions, rotary))

    scores = np.einsum("BTNH,BSNH->BNTS", turned("query"), turned("key")) / np.sqrt(8)
    assert_close(output.aux["weights"], np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))


def test_memory_has_no_positions_to_turn_by() -> None:
    plain = AttentionConfig(num_heads=3, head_dim=8)
    turning = dataclasses.replace(plain, position=RoPE())
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    _, params = made(plain)
    outputs = [
        applied(made(config)[0], params, x, mask=Mask(), memory=memory).y
        for config in (plain, turning)
    ]
    assert np.array_equal(*outputs)


NORMS = {"rms": NormConfig("rms", epsilon=1e-3), "layer": NormConfig("layer", epsilon=1e-3)}


@pytest.mark.parametrize("kind", NORMS)
def test_each_head_s_queries_and_keys_are_normed_before_they_turn(kind: str) -> None:
    rotary = RoPE(theta=100.0)
    config = AttentionConfig(
        num_heads=6, num_kv_heads=3, head_dim=8, bias=False, position=rotary, qk_norm=NORMS[kind]
    )
    mixer, params = made(config)
    x, positions = normal(1, B, T, D), array([[3, 4, 5, 6, 7]])
    output = applied(mixer, params, x, positions=positions)

    def prepared(name: str) -> Array:  # [B, T, N, H]
        heads: Any = np.einsum("BTD,DNH->BTNH", x, params[name])
        norm = params[f"{name}_norm"]
        if kind == "rms":
            normed = formulas.rms_norm(heads, norm["gain"], 1e-3)
        else:
            normed = formulas.layer_norm(heads, norm["gain"], norm["bias"], 1e-3)
        return np.asarray(apply_rope(array(normed), positions, rotary))

    q, k = prepared("query"), np.repeat(prepared("key"), 2, axis=2)
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / np.sqrt(8)
    assert_close(output.aux["weights"], np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))


def test_a_memory_is_projected_once() -> None:
    """Later queries read keys and values from the cache; the matrices are removed."""
    mixer, params = made(CASES["values of their own width"])
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    given: dict[str, Any] = dict(mask=Mask(key_lengths=array([S, 3])), memory=memory)
    whole = applied(mixer, params, x, **given)
    first = applied(mixer, params, x[:, :2], cache=mixer.init_memory_cache(B, S), **given)
    assert isinstance(first.cache, MemoryCache)
    fewer = {name: w for name, w in params.items() if not name.startswith(("key", "value"))}
    rest = applied(mixer, fewer, x[:, 2:], cache=first.cache, **given | {"memory": None})
    assert_close(np.concatenate([first.y, rest.y], axis=1), whole.y)
    assert np.array_equal(first.cache.keys, rest.cache.keys)


def test_a_memory_has_a_cache_of_its_kind_and_size() -> None:
    mixer, params = made(CASES["multi-head"])
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    call = functools.partial(applied, mixer, params, x, memory=memory)
    with pytest.raises(
        ValueError, match=r"^cache: is not one for a memory; give the cache that init_memory"
    ):
        call(cache=mixer.init_cache(B, S))
    message = r"^memory of 2 x 7 tokens: its cache is for 2 x 8; call init_memory_cache with"
    with pytest.raises(ValueError, match=message):
        call(cache=mixer.init_memory_cache(B, S + 1))


def test_axes_of_the_weights() -> None:
    mixer = Attention(CASES["grouped-query"], mixers.shared(D), parent=None)
    x, positions = normal(0, 1, 1, D), np.zeros((1, 1), int)
    init = lambda key: mixer.init(key, x, MixerInputs(array(positions), Mask()))  # noqa: E731
    boxed = jax.eval_shape(init, jax.random.key(0))["params"]
    assert {name: box.axes.names for name, box in boxed.items()} == {
        "query": ("embed", "heads", "head"),
        "query_bias": ("heads", "head"),
        "key": ("embed", "kv_heads", "head"),
        "key_bias": ("kv_heads", "head"),
        "value": ("embed", "kv_heads", "head"),
        "value_bias": ("kv_heads", "head"),
        "output": ("heads", "head", "embed"),
        "output_bias": ("embed",),
    }
    assert {name for name, box in boxed.items() if box.axes.is_matrix} == {
        "query",
        "key",
        "value",
        "output",
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 0}, "attention.num_heads 0: give 1 or more"),
        (
            {"num_heads": 6, "num_kv_heads": 4},
            "attention.num_kv_heads 4: does not divide num_heads 6; give a divisor of it",
        ),
        ({"num_kv_heads": -1}, "attention.num_kv_heads -1: give 0 or more"),
        ({"head_dim": -8}, "attention.head_dim -8: give 0 or more"),
        ({"value_head_dim": -8}, "attention.value_head_dim -8: give 0 or more"),
        ({"dropout": 1.0}, r"attention.dropout 1.0: give a fraction in \[0, 1\)"),
        (
            {"backend": "flash"},
            f"attention.backend flash: is not known; give one of {', '.join(get_args(Backend))}",
        ),
    ],
)
def test_errors(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        AttentionConfig(**fields)


def test_heads_have_to_divide_the_width_or_have_their_own() -> None:
    assert AttentionConfig(num_heads=5, head_dim=7).resolved_head_dim(D) == 7
    message = "^attention.num_heads 5: does not divide the width 12; give a divisor"
    with pytest.raises(ValueError, match=message):
        AttentionConfig(num_heads=5).resolved_head_dim(D)


def test_a_mixer_that_is_not_known() -> None:
    @dataclasses.dataclass(frozen=True)
    class Unknown(MixerConfig):
        kind = "unheard-of"

    assert mixer_class(AttentionConfig()) is Attention
    with pytest.raises(ValueError, match=r"^mixer unheard-of: is not known; give one of .*full"):
        mixer_class(Unknown())
