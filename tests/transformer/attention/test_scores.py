"""Each attention score against loops, in self and cross attention."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.transformer import formulas
from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import (
    AdditiveScore,
    AttentionConfig,
    BilinearScore,
    DotScore,
    Mask,
    MaskPattern,
    ScaledDotScore,
)
from transformer.attention.full import Attention
from transformer.attention.scores import AttentionScore

B, T, S, D = 2, 5, 7, 12
WEIGHTS = frozenset({"weights"})
GROUP = 2


def config(score: AttentionScore, **given: Any) -> AttentionConfig:
    return AttentionConfig(num_heads=3 * GROUP, num_kv_heads=3, head_dim=5, score=score, **given)


def additive(w: Any) -> Callable[..., Array]:
    """Return a function that computes w . tanh(W q + U k)."""
    return lambda q, k, b, n, t: np.array(
        np.tanh(q @ w["score_query"][n] + k @ w["score_key"][n // GROUP]) @ w["score_vector"][n]
    )


FORMULAS: dict[AttentionScore, Callable[[Any], Callable[..., Array]]] = {
    ScaledDotScore(): lambda w: lambda q, k, b, n, t: k @ q / math.sqrt(5),
    DotScore(): lambda w: lambda q, k, b, n, t: k @ q,
    BilinearScore(): lambda w: lambda q, k, b, n, t: k @ (q @ w["score_query"][n]),
    AdditiveScore(): additive,
    AdditiveScore(11): additive,
}


@pytest.mark.parametrize("score", FORMULAS)
def test_self_attention(score: AttentionScore) -> None:
    mixer, params = make_mixer(config(score), D)
    x = normal(1, B, T, D)
    output = apply_mixer(mixer, params, x, WEIGHTS, mask=Mask(MaskPattern(causal=True)))
    visible = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    y, weights = formulas.attention(x, x, params, visible, FORMULAS[score](params))
    assert_close(output.aux["weights"], weights)
    assert_close(output.y, y)


@pytest.mark.parametrize("score", [BilinearScore(), AdditiveScore(11)])
def test_cross_attention(score: AttentionScore) -> None:
    mixer, params = make_mixer(config(score), D)
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    mask = Mask(key_lengths=array([S, 3]))
    output = apply_mixer(mixer, params, x, WEIGHTS, mask=mask, memory=memory)
    visible = np.broadcast_to(np.arange(S) < np.array([[[S]], [[3]]]), (B, T, S))
    y, weights = formulas.attention(x, memory, params, visible, FORMULAS[score](params))
    assert_close(output.aux["weights"], weights)
    assert_close(output.y, y)


def test_logical_axes_of_weights() -> None:
    """One matrix per head is a stack of matrices; the score vector is not a matrix."""
    actual = axes(config(AdditiveScore(11)), D)
    assert actual["score_query"] == ("heads", "head", "score")
    assert actual["score_key"] == ("kv_heads", "head", "score")
    assert actual["score_vector"] == ("heads", "score")
    assert "score_key" not in axes(config(BilinearScore()), D)


def test_cache_stores_projected_keys() -> None:
    mixer, _ = make_mixer(config(AdditiveScore(11)), D)
    assert isinstance(mixer, Attention)
    for cache in (mixer.init_cache(2, 7), mixer.init_memory_cache(2, 7)):
        assert (cache.keys.shape, cache.values.shape) == ((2, 3, 7, 11), (2, 3, 7, 5))
