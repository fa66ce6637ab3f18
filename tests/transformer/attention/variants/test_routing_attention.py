"""Routing attention against clusters found in NumPy."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, layer_norm, normal
from tests.transformer.mixers import (
    apply_mixer,
    assert_matches_dense,
    axes,
    make_mixer,
    project_and_select,
    visible_in_groups,
)
from transformer import Mask, MaskPattern, RoutingAttentionConfig
from transformer.attention.masks import dense_mask
from transformer.attention.mixer import MixerInputs
from transformer.attention.variants.routing_attention import (
    RoutingAttention,
    attend_last_group_members,
)

B, T, D, N, H, E, WINDOW = 2, 71, 7, 2, 5, 3, 4
CONFIG = RoutingAttentionConfig(num_heads=N, head_dim=H, num_clusters=E, window=WINDOW)
BALANCED = dataclasses.replace(CONFIG, balanced=True, window=11)
DOCUMENTS = array([[1] * 40 + [2] * 30 + [0], [0] + [3] * 3 + [7] * 67])
LOSSES = frozenset({"losses"})


def normed_vectors(params: Any, x: Array, name: str) -> Any:  # [B, T, N, H]
    vectors = np.einsum("BTD,DNH->BTNH", x, params[name]) + params[f"{name}_bias"]
    return layer_norm(vectors, np.ones(()), 0.0, 1e-5)


def squared_distances(vectors: Array, centroids: Array) -> Array:  # [T, H], [E, H] -> [T, E]
    return np.asarray(np.square(vectors[:, None] - centroids[None]).sum(-1))


def nearest_cluster_mask(params: Any, x: Array, documents: Array, causal: bool) -> Array:
    """Return the last members of the query's cluster, and as many after it, [B, N, T, T]."""
    q = normed_vectors(params, x, "query")
    groups = np.zeros((B, N, T), int)
    for b, n in np.ndindex(B, N):
        groups[b, n] = np.argmin(squared_distances(q[b, :, n], params["centroids"][n]), axis=-1)
    of_documents = np.where(documents == 0, -1, E * documents)[:, None]
    return visible_in_groups(np.where(of_documents < 0, -1, of_documents + groups), WINDOW, causal)


def balanced_cluster_mask(params: Any, x: Array, is_token: Array) -> Array:
    """Return pairs of which both are among the nearest tokens of one centroid, [B, N, T, T]."""
    visible = np.zeros((B, N, T, T), bool)
    for b, n, e in np.ndindex(B, N, E):
        both, real = [], np.flatnonzero(is_token[b])
        for name in ("query", "key"):
            vectors = normed_vectors(params, x, name)[b, real, n]
            distances = squared_distances(vectors, params["centroids"][n])[:, e]
            both.append(real[np.argsort(distances, kind="stable")[: BALANCED.window]])
        visible[b, n][np.ix_(*both)] = True
    return visible


def assert_matches(
    config: RoutingAttentionConfig, params: Any, x: Array, mask: Mask, keys: str, visible: Array
) -> None:
    """Compare heads and clusters with NumPy, results and gradients with dense attention."""
    mixer, _ = make_mixer(config, D)
    inputs = MixerInputs(array(np.arange(T)[None]), mask)
    heads, chosen = project_and_select(mixer, params, x, inputs)
    assert_close(heads.q, normed_vectors(params, x, "query"))
    assert_close(heads.k, normed_vectors(params, x, keys))
    assert np.array_equal(chosen & np.asarray(dense_mask(mask, T, T))[:, None], visible)
    assert_matches_dense(mixer, params, x, inputs, visible)


@pytest.mark.sampled("True")
@pytest.mark.parametrize("causal", [True, False])
def test_nearest_clusters_match_dense_attention(causal: bool) -> None:
    _, params = make_mixer(CONFIG, D)
    x, mask = normal(1, B, T, D), Mask(MaskPattern(causal=causal), segments=DOCUMENTS)
    visible = nearest_cluster_mask(params, x, DOCUMENTS, causal)
    assert 0.02 < visible.mean() < 0.5
    assert_matches(CONFIG, params, x, mask, "query", visible)


PADDED = {
    "many": array(np.arange(T)[None] < np.array([[T], [40]])),
    "fewer than a cluster has": array(np.arange(T)[None] < np.array([[7], [0]])),
    "between": array(np.random.default_rng(3).random((B, T)) < 0.6),
}


@pytest.mark.sampled("[between", "[fewer")
@pytest.mark.parametrize("padded", PADDED)
def test_balanced_clusters_match_dense_attention(padded: str) -> None:
    """A token may be in several clusters, or in none; then its output is zero, as for padding."""
    _, params = make_mixer(BALANCED, D)
    x, is_token = normal(1, B, T, D), PADDED[padded]
    visible = balanced_cluster_mask(params, x, is_token)
    assert not visible.any(-1).all()
    assert visible.sum(-1).max() > BALANCED.window or padded == "fewer than a cluster has"
    mask = Mask(segments=array(3 * is_token), single_document=True)
    assert_matches(BALANCED, params, x, mask, "key", visible)
    if padded != "between":
        lengths = Mask(key_lengths=array(is_token.sum(1)))
        assert_matches(BALANCED, params, x, lengths, "key", visible)


def test_last_group_members_in_a_cache() -> None:
    """Three keys of the cluster are before position 5 and two of them are visible; none at position
    -1.
    """
    groups, q = array([[[0], [1], [0], [0], [1], [1]]]), array(np.zeros((1, 2, 1, 2), np.float32))
    k = array(np.zeros((1, 6, 1, 2), np.float32))
    v = array(np.float32(2 ** np.arange(6)).reshape(1, 6, 1, 1))

    @jax.jit
    def attend(q: Any, k: Any, v: Any, owns: Any, groups: Any, places: Any) -> Any:
        return attend_last_group_members(q, k, v, owns, groups, places, 2, scale=1.0)

    def ask(own: int, at: list[int]) -> list[float]:
        owns, places = array([[[own], [own]]]), array([at])
        y = np.asarray(attend(q, k, v, owns, groups, places))
        actual: list[float] = y[0, :, 0, 0].tolist()
        return actual

    assert ask(0, [5, 2]) == [(4 + 8) / 2, (1 + 4) / 2]
    assert ask(1, [3, -1]) == [2, 0]


@pytest.mark.full
def test_auxiliary_loss_is_the_distance_to_the_nearest_centroid() -> None:
    mixer, params = make_mixer(CONFIG, D)
    x, mask = normal(1, B, T, D), Mask(MaskPattern(causal=True), segments=DOCUMENTS)
    q, real = normed_vectors(params, x, "query"), DOCUMENTS != 0
    nearest = [
        squared_distances(q[b, :, n], params["centroids"][n]).min(-1)[real[b]]
        for b, n in np.ndindex(B, N)
    ]
    loss = lambda p: apply_mixer(mixer, p, x, LOSSES, mask=mask).aux["loss/centroids"]  # noqa: E731
    assert_close(loss(params), 0.01 * np.concatenate(nearest).mean())
    moves = jax.jit(jax.grad(loss))(params)
    assert [name for name, each in moves.items() if np.any(each)] == ["centroids"]
    assert not apply_mixer(mixer, params, x, mask=mask).aux


def test_flops() -> None:
    """Three centroids, and the keys within a window of 4: 207 / 71 on each side of a token."""
    each = 2 * N * H
    keys_per_side, centroids = 207 / 71, each * E
    full, causal = (round(2 * each * seen) for seen in (2 * keys_per_side + 1, keys_per_side + 1))
    assert RoutingAttention.score_flops(CONFIG, D, T) == (centroids + full, centroids + causal)
    pairs = 2 * each * E * 11 * 11 // T  # pairs of queries and keys that share a cluster, per token
    assert RoutingAttention.score_flops(BALANCED, D, T) == (2 * centroids + pairs,) * 2


def test_weights_and_invalid_calls() -> None:
    assert axes(CONFIG, D)["centroids"] == ("heads", "clusters", "head")
    assert "key" not in axes(CONFIG, D)
    assert "key" in axes(BALANCED, D)
    mixer, params = make_mixer(BALANCED, D)
    x = normal(0, B, T, D)
    with pytest.raises(ValueError, match="balanced clusters depend on the whole row"):
        apply_mixer(mixer, params, x, mask=Mask(MaskPattern(causal=True)))
