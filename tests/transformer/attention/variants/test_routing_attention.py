"""Routing attention against clusters found in NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import (
    Array,
    array,
    assert_close,
    assert_trees_close,
    layer_norm,
    normal,
)
from tests.transformer.mixers import (
    apply_mixer,
    axes,
    dense_attention,
    make_mixer,
    project_and_select,
    value_and_gradients,
)
from transformer import (
    Mask,
    MaskPattern,
    RoPE,
    RoutingAttentionConfig,
)
from transformer.attention.mixer import MixerInputs
from transformer.attention.sparse_ops.top_k_keys import attend_last_group_members
from transformer.attention.variants.routing_attention import (
    RoutingAttention,
)
from transformer.testing.contract import check_mixer

B, T, D, N, H, E, WINDOW = 2, 71, 7, 2, 5, 3, 4
CONFIG = RoutingAttentionConfig(num_heads=N, head_dim=H, num_clusters=E, window=WINDOW)
BALANCED = dataclasses.replace(CONFIG, balanced=True, window=11)
DOCUMENTS = array([[1] * 40 + [2] * 30 + [0], [0] + [3] * 3 + [7] * 67])
LOSSES = frozenset({"losses"})


def normed_vectors(params: Any, x: Array, name: str) -> Any:  # [B, T, N, H]
    make_mixer = np.einsum("BTD,DNH->BTNH", x, params[name]) + params[f"{name}_bias"]
    return layer_norm(make_mixer, np.ones(()), 0.0, 1e-5)


def squared_distances(vectors: Array, centroids: Array) -> Array:  # [T, H], [E, H] -> [T, E]
    return np.asarray(np.square(vectors[:, None] - centroids[None]).sum(-1))


def nearest_cluster_mask(params: Any, x: Array, documents: Array, causal: bool) -> Array:
    """Return visible pairs [B, N, T, T]: the last members of the query's cluster, and as many after
    it.
    """
    q, index = normed_vectors(params, x, "query"), np.arange(T)
    visible = np.zeros((B, N, T, T), bool)
    for b, n, t in np.ndindex(B, N, T):
        cluster = np.argmin(squared_distances(q[b, :, n], params["centroids"][n]), axis=-1)
        if documents[b, t]:
            same_cluster = index[(cluster == cluster[t]) & (documents[b] == documents[b, t])]
            before, after = (
                same_cluster[same_cluster <= t][-WINDOW:],
                same_cluster[same_cluster > t][: WINDOW - 1],
            )
            visible[b, n, t, [*before, *([] if causal else after)]] = True
    return visible


def balanced_cluster_mask(params: Any, x: Array, is_token: Array) -> Array:
    """Return visible pairs [B, N, T, T]: query and key are both among the nearest tokens of one
    centroid.
    """
    visible = np.zeros((B, N, T, T), bool)
    for b, n, e in np.ndindex(B, N, E):
        both, real = [], np.flatnonzero(is_token[b])
        for name in ("query", "key"):
            vectors = normed_vectors(params, x, name)[b, real, n]
            distances = squared_distances(vectors, params["centroids"][n])[:, e]
            both.append(real[np.argsort(distances, kind="stable")[: BALANCED.window]])
        visible[b, n][np.ix_(*both)] = True
    return visible


def masked_attention(seen: Array, keys: str, x: Array) -> Any:
    """Return the mixer as a function: softmax attention under the given masks, differentiable."""

    def heads(p: Any, name: str) -> Any:
        return jnp.einsum("BTD,DNH->BTNH", x, p[name]) + p[f"{name}_bias"][None, None]

    def normalize(vectors: Any) -> Any:
        centred = vectors - vectors.mean(-1, keepdims=True)
        return centred / (jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5) ** 0.5

    def run(p: Any) -> Any:
        q, k = (normalize(heads(p, name)) for name in ("query", keys))
        y = dense_attention(q, k, heads(p, "value"), seen)
        return jnp.einsum("BTNH,NHD->BTD", y, p["output"]) + p["output_bias"][None, None]

    return run


def assert_matches_dense(
    config: RoutingAttentionConfig, params: Any, x: Array, mask: Mask, run: Any
) -> None:
    """Compare outputs, and the gradients of all weights."""
    mixer, _ = make_mixer(config, D)
    actual = value_and_gradients(lambda p: apply_mixer(mixer, p, x, mask=mask).y, params)
    assert_trees_close(actual, value_and_gradients(run, params))
    assert not np.any(actual[1][0]["centroids"])


@pytest.mark.sampled("True")
@pytest.mark.parametrize("causal", [True, False])
def test_nearest_clusters_match_dense_attention(causal: bool) -> None:
    _, params = make_mixer(CONFIG, D)
    x, mask = normal(1, B, T, D), Mask(MaskPattern(causal=causal), segments=DOCUMENTS)
    visible = nearest_cluster_mask(params, x, DOCUMENTS, causal)
    assert 0.02 < visible.mean() < 0.5
    assert_matches_dense(CONFIG, params, x, mask, masked_attention(visible, "query", x))


PADDED = {
    "many": array(np.arange(T)[None] < np.array([[T], [40]])),
    "fewer than a cluster has": array(np.arange(T)[None] < np.array([[7], [0]])),
    "between": array(np.random.default_rng(3).random((B, T)) < 0.6),
}


@pytest.mark.sampled("[between")
@pytest.mark.parametrize("padded", PADDED)
def test_balanced_clusters_match_dense_attention(padded: str) -> None:
    """A token may be in several clusters, or in none; then its output is zero, as for padding."""
    mixer, params = make_mixer(BALANCED, D)
    x, is_token = normal(1, B, T, D), PADDED[padded]
    visible = balanced_cluster_mask(params, x, is_token)
    assert not visible.any(-1).all()
    assert visible.sum(-1).max() > BALANCED.window or padded == "fewer than a cluster has"
    mask = Mask(segments=array(3 * is_token), single_document=True)
    inputs = MixerInputs(array(np.arange(T)[None]), mask)
    _, chosen = project_and_select(mixer, params, x, inputs)
    assert np.array_equal(chosen, visible)
    assert_matches_dense(BALANCED, params, x, mask, masked_attention(visible, "key", x))
    if padded != "between":
        lengths = Mask(key_lengths=array(is_token.sum(1)))
        assert_matches_dense(BALANCED, params, x, lengths, masked_attention(visible, "key", x))


@pytest.mark.full
def test_padding_does_not_enter_balanced_clusters() -> None:
    """Whether it is near to the centroids or far, other tokens are unchanged and it has no
    gradient.

    Within one compiled program, they are bit-equal. Tested with 40 tokens, and with fewer than a
    cluster holds.
    """
    mixer, params = make_mixer(BALANCED, D)
    mask = Mask(segments=array(np.ones((1, T), int)), single_document=True)
    x, padding_values = normal(1, B, T, D), (0, 100)

    @jax.jit
    def value_and_gradient(x: Any, is_token: Any) -> Any:
        def run(x: Any) -> Any:
            kwargs: Any = dict(
                positions=jnp.arange(T)[None], mask=mask.replace(segments=is_token * 1)
            )
            output: Any = mixer.apply({"params": params}, x, MixerInputs(**kwargs))
            return output.y

        y, vjp_fn = jax.vjp(run, x)
        return y, vjp_fn(jnp.cos(y) * is_token[..., None])[0]

    for length in (40, BALANCED.window - 4):
        is_token = np.arange(T)[None] < length
        alone = apply_mixer(mixer, params, x[:, :length]).y
        filled = [
            np.where(is_token[..., None], x, by * normal(5, B, T, D)) for by in padding_values
        ]
        (y, gradient), (other_y, other_gradient) = (
            value_and_gradient(array(each), is_token) for each in filled
        )
        assert_close(y[:, :length], alone)
        assert np.array_equal(y[:, :length], other_y[:, :length])
        assert np.array_equal(gradient, other_gradient)
        assert np.any(gradient[:, :length])
        assert not np.any(gradient[:, length:])


@pytest.mark.full
def test_mixer_contract() -> None:
    small: dict[str, Any] = dict(d_model=7, length=71, lengths=(1, 71))
    check_mixer(dataclasses.replace(CONFIG, position=RoPE()), **small)


@pytest.mark.full
def test_mixer_contract_with_balanced_clusters() -> None:
    check_mixer(BALANCED, d_model=7, length=31, lengths=(1, 31))


def test_last_group_members_in_a_cache() -> None:
    """Three keys of the cluster are before position 5 and two of them are visible; none at position
    -1.
    """
    groups, q = array([[[0], [1], [0], [0], [1], [1]]]), array(np.zeros((1, 2, 1, 2), np.float32))
    k = array(np.zeros((1, 6, 1, 2), np.float32))
    v = array(np.float32(2 ** np.arange(6)).reshape(1, 6, 1, 1))

    def ask(own: int, at: list[int]) -> list[float]:
        owns, places = array([[[own], [own]]]), array([at])
        y = attend_last_group_members(q, k, v, owns, groups, places, 2, scale=1.0)
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
    with pytest.raises(ValueError, match="packed documents"):
        apply_mixer(mixer, params, x, mask=Mask(segments=DOCUMENTS))
