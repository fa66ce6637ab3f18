"""Each score by hand and against loops, in self and cross attention."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.transformer import formulas
from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import applied, axes, made
from transformer import (
    AdditiveScore,
    AttentionConfig,
    BilinearScore,
    DotScore,
    Mask,
    MaskPattern,
    RelativePositions,
    RoPE,
    ScaledDotScore,
)
from transformer.attention.attention_config import AttentionScore
from transformer.attention.full import Attention

B, T, S, D = 2, 5, 7, 12
WEIGHTS = frozenset({"weights"})
GROUP = 2


def config(score: AttentionScore, **given: Any) -> AttentionConfig:
    return AttentionConfig(num_heads=3 * GROUP, num_kv_heads=3, head_dim=5, score=score, **given)


def additive(w: Any) -> Callable[..., Array]:
    """w . tanh(W q + U k)."""
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
    mixer, params = made(config(score), D)
    x = normal(1, B, T, D)
    output = applied(mixer, params, x, WEIGHTS, mask=Mask(MaskPattern(causal=True)))
    seen = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    y, weights = formulas.attention(x, x, params, seen, FORMULAS[score](params))
    assert_close(output.aux["weights"], weights)
    assert_close(output.y, y)


@pytest.mark.parametrize("score", FORMULAS)
def test_cross_attention(score: AttentionScore) -> None:
    mixer, params = made(config(score), D)
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    mask = Mask(key_lengths=array([S, 3]))
    output = applied(mixer, params, x, WEIGHTS, mask=mask, memory=memory)
    seen = np.broadcast_to(np.arange(S) < np.array([[[S]], [[3]]]), (B, T, S))
    y, weights = formulas.attention(x, memory, params, seen, FORMULAS[score](params))
    assert_close(output.aux["weights"], weights)
    assert_close(output.y, y)


@pytest.mark.parametrize(
    ("score", "weights", "difference"),
    [
        (DotScore(), {}, 3 - 5),
        (ScaledDotScore(), {}, (3 - 5) / math.sqrt(2)),
        # q W = (4, 1): 6 and 12.
        (BilinearScore(), {"score_query": [[[0, 1], [2, 0]]]}, 12 - 6),
        # W q = 1; U k = 1 and 0.
        (
            AdditiveScore(1),
            {
                "score_query": [[[1], [0]]],
                "score_key": [[[0], [0.5]]],
                "score_vector": [[3]],
            },
            3 * math.tanh(1) - 3 * math.tanh(2),
        ),
    ],
    ids=["dot", "scaled dot", "bilinear", "additive"],
)
def test_by_hand(score: AttentionScore, weights: dict[str, Any], difference: float) -> None:
    """A query (1, 2) and keys (1, 2) and (3, 0): scores are logarithms of the weights."""
    mixer, params = made(AttentionConfig(num_heads=1, bias=False, score=score), 2)
    identity = np.eye(2, dtype=np.float32)[:, None]
    params |= {"query": identity, "key": identity}
    params |= {name: np.array(values, np.float32) for name, values in weights.items()}
    x = array([[[1, 2], [3, 0]]]).astype(np.float32)
    found = applied(mixer, params, x, WEIGHTS).aux["weights"][0, 0, 0]
    assert float(np.log(found[1] / found[0])) == pytest.approx(difference, abs=1e-5)


def test_axes_of_the_weights() -> None:
    """A matrix for each head is a stack of matrices; the vector is none."""
    found = axes(config(AdditiveScore(11)), D)
    assert found["score_query"] == ("heads", "head", "score")
    assert found["score_key"] == ("kv_heads", "head", "score")
    assert found["score_vector"] == ("heads", "score")
    assert "score_key" not in axes(config(BilinearScore()), D)


def test_a_cache_keeps_keys_as_they_meet_queries() -> None:
    mixer, _ = made(config(AdditiveScore(11)), D)
    assert isinstance(mixer, Attention)
    for cache in (mixer.init_cache(2, 7), mixer.init_memory_cache(2, 7)):
        assert (cache.keys.shape, cache.values.shape) == ((2, 7, 3, 11), (2, 7, 3, 5))


@pytest.mark.parametrize("position", [RoPE(), RelativePositions()])
def test_positions_that_work_in_products_are_refused_elsewhere(position: Any) -> None:
    message = f"^attention.position {type(position).__name__}: needs scores that are dot products"
    with pytest.raises(ValueError, match=message):
        AttentionConfig(score=AdditiveScore(), position=position)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^additive_score.hidden_dim -1: give 0 or more$"):
        AdditiveScore(-1)
