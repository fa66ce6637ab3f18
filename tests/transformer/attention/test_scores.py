"""Each attention score by hand and against loops, in self and cross attention."""

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


@pytest.mark.parametrize("score", FORMULAS)
def test_cross_attention(score: AttentionScore) -> None:
    mixer, params = make_mixer(config(score), D)
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    mask = Mask(key_lengths=array([S, 3]))
    output = apply_mixer(mixer, params, x, WEIGHTS, mask=mask, memory=memory)
    visible = np.broadcast_to(np.arange(S) < np.array([[[S]], [[3]]]), (B, T, S))
    y, weights = formulas.attention(x, memory, params, visible, FORMULAS[score](params))
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
def test_weights_by_hand(score: AttentionScore, weights: dict[str, Any], difference: float) -> None:
    """Query (1, 2), keys (1, 2) and (3, 0).

    Scores are logarithms of the weights up to a constant.
    """
    mixer, params = make_mixer(AttentionConfig(num_heads=1, bias=False, score=score), 2)
    identity = np.eye(2, dtype=np.float32)[:, None]
    params |= {"query": identity, "key": identity}
    params |= {name: np.array(values, np.float32) for name, values in weights.items()}
    x = array([[[1, 2], [3, 0]]]).astype(np.float32)
    actual = apply_mixer(mixer, params, x, WEIGHTS).aux["weights"][0, 0, 0]
    assert float(np.log(actual[1] / actual[0])) == pytest.approx(difference, abs=1e-5)


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
        assert (cache.keys.shape, cache.values.shape) == ((2, 7, 3, 11), (2, 7, 3, 5))


@pytest.mark.parametrize("position", [RoPE(), RelativePositions()])
def test_dot_product_positions_reject_additive_scores(position: Any) -> None:
    message = f"^attention.position {type(position).__name__}: needs scores that are dot products"
    with pytest.raises(ValueError, match=message):
        AttentionConfig(score=AdditiveScore(), position=position)


def test_invalid_fields_raise() -> None:
    with pytest.raises(ValueError, match=r"^additive_score.hidden_dim -1: give 0 or more$"):
        AdditiveScore(-1)
