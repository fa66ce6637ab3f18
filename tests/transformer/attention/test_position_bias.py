"""Position tables and biases, alone and inside attention with documents packed into rows."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.positions import ALIBI_HEADS, FURTHEST
from tests.fixtures.positions import BUCKETS as BUCKET_CASES
from tests.transformer import formulas
from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import (
    ALiBi,
    AttentionConfig,
    BilinearScore,
    Mask,
    MaskPattern,
    RelativePositions,
    T5RelativeBias,
)
from transformer.attention.masks import dense_mask
from transformer.attention.position_bias import alibi_bias, alibi_slopes

FIXTURES = np.load(Path(__file__).parents[2] / "fixtures" / "positions.npz")
B, T, S, D, N, H, VALUES = 2, 5, 7, 12, 3, 11, 13
WEIGHTS = frozenset({"weights"})
POSITIONS = array([[0, 1, 2, 0, 1], [0, 1, 2, 3, 9]])
DOCUMENTS = array([[1, 1, 1, 2, 2], [1, 1, 1, 1, 1]])
RELATIVE, BUCKETS = RelativePositions(max_distance=2), T5RelativeBias(num_buckets=4, max_distance=3)


def config(position: Any, **given: Any) -> AttentionConfig:
    return AttentionConfig(
        num_heads=N, head_dim=H, value_head_dim=VALUES, bias=False, position=position, **given
    )


def distances(b: int, t: int) -> Array:  # [S]
    return np.asarray(POSITIONS[b] - POSITIONS[b, t])


def scores_with_bias(bias: Callable[[Any, int, Array], Array]) -> Callable[[Any], Any]:
    return lambda w: lambda q, k, b, n, t: k @ q / math.sqrt(H) + bias(w, n, distances(b, t))


def table_rows(b: int, t: int) -> Array:  # [S]
    return np.clip(distances(b, t), -2, 2) + 2


CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "ALiBi": (ALiBi(), scores_with_bias(lambda w, n, away: -alibi_slopes(N)[n] * np.abs(away))),
    "buckets": (
        BUCKETS,
        scores_with_bias(
            lambda w, n, away: w["position_bias"][[BUCKETS.bucket(d) for d in away], n]
        ),
    ),
    # e_ij = q_i (k_j + a^K_ij) / sqrt(d)
    "relative": (
        RELATIVE,
        lambda w: (
            lambda q, k, b, n, t: (k + w["position_keys"][table_rows(b, t)]) @ q / math.sqrt(H)
        ),
    ),
}


@pytest.mark.parametrize("heads", ALIBI_HEADS)
def test_alibi_slopes_match_hugging_face(heads: int) -> None:
    assert_close(alibi_slopes(heads), FIXTURES[f"alibi/{heads}"], 1e-7)


def test_alibi_falls_linearly_with_distance_in_both_directions() -> None:
    queries, keys = array([[0, 5], [7, 7]]), array([[0, 1, 5], [9, 6, 7]])
    distance = np.array([[[0, 1, 5], [5, 4, 0]], [[2, 1, 0], [2, 1, 0]]])
    expected = np.stack([-distance / 16, -distance / 256], axis=1).astype(np.float32)
    assert np.array_equal(alibi_bias(2, queries, keys), expected)


@pytest.mark.parametrize("name", BUCKET_CASES)
def test_t5_buckets_match_hugging_face(name: str) -> None:
    config = T5RelativeBias(*BUCKET_CASES[name])
    buckets = [config.bucket(distance) for distance in range(-FURTHEST, FURTHEST + 1)]
    assert buckets == FIXTURES[f"buckets/{name}"].tolist()


@pytest.mark.parametrize("name", CASES)
def test_packed_documents_match_formula(name: str) -> None:
    position, scores = CASES[name]
    mixer, params = make_mixer(config(position), D)
    x = normal(1, B, T, D)
    mask = Mask(MaskPattern(causal=True), positions=POSITIONS, segments=DOCUMENTS)
    output = apply_mixer(mixer, params, x, WEIGHTS, mask=mask, positions=POSITIONS)
    tables = params.get("position_values")
    value_terms: Any = (
        (lambda b, t: tables[table_rows(b, t)]) if name == "relative" else lambda b, t: 0.0
    )
    visible = np.asarray(dense_mask(mask, T, T))
    y, weights = formulas.attention(x, x, params, visible, scores(params), value_terms)
    assert_close(output.aux["weights"], weights)
    assert_close(output.y, y)


def test_relative_tables_with_bilinear_scores() -> None:
    """The score is (q W) (k + a)."""
    mixer, w = make_mixer(config(RELATIVE, score=BilinearScore()), D)
    x = normal(1, B, T, D)

    def scores(q: Array, k: Array, b: int, n: int, t: int) -> Array:
        return (k + w["position_keys"][table_rows(b, t)]) @ (q @ w["score_query"][n])

    visible = np.ones((B, T, T), bool)
    value_terms = lambda b, t: w["position_values"][table_rows(b, t)]  # noqa: E731
    y, _ = formulas.attention(x, x, w, visible, scores, value_terms)
    assert_close(apply_mixer(mixer, w, x, positions=POSITIONS).y, y)


@pytest.mark.parametrize("name", CASES)
def test_cross_attention_has_no_position_parameters(name: str) -> None:
    x, memory = normal(1, B, T, D), normal(2, B, S, D)
    mixer, params = make_mixer(config(CASES[name][0]), D, memory=memory[:1])
    assert set(params) == {"query", "key", "value", "output"}
    y, _ = formulas.attention(x, memory, params, np.ones((B, T, S), bool))
    assert_close(apply_mixer(mixer, params, x, memory=memory).y, y)


def test_tables_have_no_input_axes() -> None:
    """So weight decay and Muon exclude them."""
    relative, buckets = axes(config(RELATIVE), D), axes(config(BUCKETS), D)
    assert relative["position_keys"] == relative["position_values"] == ("distances", "head")
    assert buckets["position_bias"] == ("buckets", "heads")
