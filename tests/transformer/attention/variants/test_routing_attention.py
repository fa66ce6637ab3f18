"""Routing attention against clusters looked up in NumPy."""

import dataclasses
import math
from typing import Any, cast

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
    weights_of,
)
from tests.transformer.mixers import applied, axes, made
from transformer import (
    BlockConfig,
    Classifier,
    Mask,
    MaskPattern,
    RoPE,
    RoutingAttentionConfig,
    TransformerConfig,
)
from transformer.attention.mixer import MixerInputs
from transformer.attention.sparse_ops.top_k_keys import attend_last_group_members
from transformer.attention.variants.routing_attention import (
    RoutingAttention,
    centroid_affinity,
    kmeans_loss,
)
from transformer.testing.contract import check_mixer
from transformer.testing.trial import projections

B, T, D, N, H, E, WINDOW = 2, 71, 7, 2, 5, 3, 4
CONFIG = RoutingAttentionConfig(num_heads=N, head_dim=H, num_clusters=E, window=WINDOW)
BALANCED = dataclasses.replace(CONFIG, balanced=True, window=11)
DOCUMENTS = array([[1] * 40 + [2] * 30 + [0], [0] + [3] * 3 + [7] * 67])
LOSSES = frozenset({"losses"})


def normed(params: Any, x: Array, name: str) -> Any:  # [B, T, N, H]
    made = np.einsum("BTD,DNH->BTNH", x, params[name]) + params[f"{name}_bias"]
    return layer_norm(made, np.ones(()), 0.0, 1e-5)


def far(vectors: Array, centroids: Array) -> Array:  # [T, H], [E, H] -> [T, E]
    return np.asarray(np.square(vectors[:, None] - centroids[None]).sum(-1))


def own_cluster(params: Any, x: Array, documents: Array, causal: bool) -> Array:
    """Return [B, N, T, T] booleans: the query's cluster, its last members and as many after it."""
    q, index = normed(params, x, "query"), np.arange(T)
    seen = np.zeros((B, N, T, T), bool)
    for b, n, t in np.ndindex(B, N, T):
        cluster = np.argmin(far(q[b, :, n], params["centroids"][n]), axis=-1)
        if documents[b, t]:
            alike = index[(cluster == cluster[t]) & (documents[b] == documents[b, t])]
            before, after = alike[alike <= t][-WINDOW:], alike[alike > t][: WINDOW - 1]
            seen[b, n, t, [*before, *([] if causal else after)]] = True
    return seen


def any_cluster(params: Any, x: Array, there: Array) -> Array:
    """[B, N, T, T] booleans: queries and keys that are among the nearest to one centroid."""
    seen = np.zeros((B, N, T, T), bool)
    for b, n, e in np.ndindex(B, N, E):
        both, real = [], np.flatnonzero(there[b])
        for name in ("query", "key"):
            vectors = normed(params, x, name)[b, real, n]
            distances = far(vectors, params["centroids"][n])[:, e]
            both.append(real[np.argsort(distances, kind="stable")[: BALANCED.window]])
        seen[b, n][np.ix_(*both)] = True
    return seen


def dense(seen: Array, keys: str, x: Array) -> Any:
    """The mixer as softmax attention under `max_values`, to be differentiated."""

    def heads(p: Any, name: str) -> Any:
        return jnp.einsum("BTD,DNH->BTNH", x, p[name]) + p[f"{name}_bias"][None, None]

    def unit(made: Any) -> Any:
        centred = made - made.mean(-1, keepdims=True)
        return centred / (jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5) ** 0.5

    def run(p: Any) -> Any:
        q, k = (unit(heads(p, name)) for name in ("query", keys))
        raised = jnp.exp(jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(H)) * seen
        total = raised.sum(-1, keepdims=True)
        y = jnp.einsum(
            "BNTS,BSNH->BTNH", raised / jnp.where(total > 0, total, 1), heads(p, "value")
        )
        return jnp.einsum("BTNH,NHD->BTD", y, p["output"]) + p["output_bias"][None, None]

    return run


def assert_same(
    config: RoutingAttentionConfig, params: Any, x: Array, mask: Mask, run: Any
) -> None:
    """Values, and the gradients of all weights."""
    mixer, _ = made(config, D)

    def probed(f: Any) -> Any:  # y and the gradients
        def probe(p: Any) -> tuple[jax.Array, jax.Array]:
            y = f(p)
            return jnp.sum(jnp.sin(y)), y

        (_, y), found = jax.jit(jax.value_and_grad(probe, has_aux=True))(params)
        return y, found

    y, got = probed(lambda p: applied(mixer, p, x, mask=mask).y)
    right, expected = probed(run)
    assert_close(y, right)
    for name, each in expected.items():
        assert_close(got[name], each)
    assert not np.any(got["centroids"])


@pytest.mark.slow
@pytest.mark.sampled("True")
@pytest.mark.parametrize("causal", [True, False])
def test_each_token_in_its_nearest_cluster(causal: bool) -> None:
    _, params = made(CONFIG, D)
    x, mask = normal(1, B, T, D), Mask(MaskPattern(causal=causal), segments=DOCUMENTS)
    seen = own_cluster(params, x, DOCUMENTS, causal)
    assert 0.02 < seen.mean() < 0.5
    assert_same(CONFIG, params, x, mask, dense(seen, "query", x))


PADDED = {
    "many": array(np.arange(T)[None] < np.array([[T], [40]])),
    "fewer than a cluster has": array(np.arange(T)[None] < np.array([[7], [0]])),
    "between": array(np.random.default_rng(3).random((B, T)) < 0.6),
}


@pytest.mark.slow
@pytest.mark.sampled("[between")
@pytest.mark.parametrize("padded", PADDED)
def test_balanced_clusters_take_the_nearest_tokens_that_are_there(padded: str) -> None:
    """A token may be in several clusters, or in none: then it has zeros, as padding has."""
    mixer, params = made(BALANCED, D)
    x, there = normal(1, B, T, D), PADDED[padded]
    seen = any_cluster(params, x, there)
    assert not seen.any(-1).all()
    assert seen.sum(-1).max() > BALANCED.window or padded == "fewer than a cluster has"
    mask = Mask(segments=array(3 * there), single_document=True)
    inputs = MixerInputs(array(np.arange(T)[None]), mask)
    chosen = cast(Any, mixer).select(projections(mixer, params, x, inputs), inputs)
    assert np.array_equal(chosen, seen)
    assert_same(BALANCED, params, x, mask, dense(seen, "key", x))
    if padded != "between":
        lengths = Mask(key_lengths=array(there.sum(1)))
        assert_same(BALANCED, params, x, lengths, dense(seen, "key", x))


@pytest.mark.slow
def test_padding_takes_no_place_in_balanced_clusters() -> None:
    """It is near to the centroids, or far: others are as if it were not there, bit for bit where
    the same program computes it, and it has no gradient. Of 40 tokens and of fewer than a cluster
    would hold."""
    mixer, params = made(BALANCED, D)
    mask = Mask(segments=array(np.ones((1, T), int)), single_document=True)
    x, others = normal(1, B, T, D), (0, 100)

    @jax.jit
    def probe(x: Any, there: Any) -> Any:
        def run(x: Any) -> Any:
            given: Any = dict(positions=jnp.arange(T)[None], mask=mask.replace(segments=there * 1))
            output: Any = mixer.apply({"params": params}, x, MixerInputs(**given))
            return output.y

        y, pull = jax.vjp(run, x)
        return y, pull(jnp.cos(y) * there[..., None])[0]

    for length in (40, BALANCED.window - 4):
        there = np.arange(T)[None] < length
        alone = applied(mixer, params, x[:, :length]).y
        filled = [np.where(there[..., None], x, by * normal(5, B, T, D)) for by in others]
        (y, slope), (again, steep) = (probe(array(each), there) for each in filled)
        assert_close(y[:, :length], alone)
        assert np.array_equal(y[:, :length], again[:, :length])
        assert np.array_equal(slope, steep)
        assert np.any(slope[:, :length])
        assert not np.any(slope[:, length:])


@pytest.mark.full
def test_a_classifier_pads_in_balanced_clusters() -> None:
    """Logits and gradients are those of the examples alone; one row is empty."""
    block = BlockConfig(mixer=BALANCED)
    model = Classifier(
        TransformerConfig(
            vocab_size=17, d_model=D, num_layers=2, layer_pattern=(block,), causal=False
        ),
        pooling="mean",
    )
    tokens = array(np.random.default_rng(2).integers(0, 17, (3, 29)))
    params = weights_of(jax.eval_shape(model.init, jax.random.key(0), tokens)["params"])

    def total(params: Any, tokens: Any, segments: Any) -> Any:
        logits: Any = model.apply({"params": params}, tokens, segments=segments).logits
        return jnp.sin(logits[:2]).sum(), logits

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    segments = array(np.arange(29)[None] < np.array([[23], [23], [0]]))
    (_, logits), slope = run(params, tokens, segments * 1)
    (_, alone), expected = run(params, tokens[:2, :23], None)
    assert_close(logits[:2], alone)
    assert_trees_close(slope, expected)


@pytest.mark.full
def test_the_contract() -> None:
    small: dict[str, Any] = dict(d_model=7, length=71, lengths=(1, 71))
    check_mixer(dataclasses.replace(CONFIG, position=RoPE()), **small)


@pytest.mark.full
def test_the_contract_of_balanced_clusters() -> None:
    check_mixer(BALANCED, d_model=7, length=31, lengths=(1, 31))


def test_the_last_members_of_a_cache() -> None:
    """Three keys of the cluster before position 5, of which two are seen; none at -1."""
    groups, q = array([[[0], [1], [0], [0], [1], [1]]]), array(np.zeros((1, 2, 1, 2), np.float32))
    k = array(np.zeros((1, 6, 1, 2), np.float32))
    v = array(np.float32(2 ** np.arange(6)).reshape(1, 6, 1, 1))

    def ask(own: int, at: list[int]) -> list[float]:
        owns, places = array([[[own], [own]]]), array([at])
        y = attend_last_group_members(q, k, v, owns, groups, places, 2, scale=1.0)
        found: list[float] = y[0, :, 0, 0].tolist()
        return found

    assert ask(0, [5, 2]) == [(4 + 8) / 2, (1 + 4) / 2]
    assert ask(1, [3, -1]) == [2, 0]


@pytest.mark.slow
def test_the_auxiliary_loss_is_the_distance_to_the_nearest_centroid() -> None:
    mixer, params = made(CONFIG, D)
    x, mask = normal(1, B, T, D), Mask(MaskPattern(causal=True), segments=DOCUMENTS)
    q, real = normed(params, x, "query"), DOCUMENTS != 0
    nearest = [
        far(q[b, :, n], params["centroids"][n]).min(-1)[real[b]] for b, n in np.ndindex(B, N)
    ]
    loss = lambda p: applied(mixer, p, x, LOSSES, mask=mask).aux["loss/centroids"]  # noqa: E731
    assert_close(loss(params), 0.01 * np.concatenate(nearest).mean())
    moves = jax.jit(jax.grad(loss))(params)
    assert [name for name, each in moves.items() if np.any(each)] == ["centroids"]
    assert not applied(mixer, params, x, mask=mask).aux


def test_the_auxiliary_loss_moves_centroids_to_planted_clusters() -> None:
    """Gradient descent, from centroids that are elsewhere."""
    random = np.random.default_rng(0)
    middles: Any = 3 * np.eye(E, H, dtype=np.float32)
    spread = random.normal(size=(1, 600, N, H)).astype(np.float32)
    x: Any = middles[random.integers(0, E, (1, 600, N))] + 0.3 * spread
    start = array(np.float32(0.3 * middles + 0.1 * random.normal(size=(N, E, H))))

    def loss(centroids: Any) -> jax.Array:
        return kmeans_loss([centroid_affinity(x, centroids)], None)

    def step(centroids: Any, _: Any) -> Any:
        return centroids - 0.5 * N * E * jax.grad(loss)(centroids), None

    after = jax.jit(lambda c: jax.lax.scan(step, c, length=40)[0])(start)
    assert_close(after, np.broadcast_to(middles[None], (N, E, H)), tolerance=0.03)
    assert_close(loss(after), H * 0.3**2, tolerance=0.03)
    assert float(loss(start)) > 3


def test_costs() -> None:
    """Three centroids, and the keys that a window of 4 shows: 207 / 71 on each side of a token."""
    each = 2 * N * H
    near, centroids = 207 / 71, each * E
    full, causal = (round(2 * each * seen) for seen in (2 * near + 1, near + 1))
    assert RoutingAttention.score_flops(CONFIG, D, T) == (centroids + full, centroids + causal)
    pairs = 2 * each * E * 11 * 11 // T  # of queries and keys that share a cluster, for each token
    assert RoutingAttention.score_flops(BALANCED, D, T) == (2 * centroids + pairs,) * 2


def test_weights_and_errors() -> None:
    assert axes(CONFIG, D)["centroids"] == ("heads", "clusters", "head")
    assert "key" not in axes(CONFIG, D)
    assert "key" in axes(BALANCED, D)
    wrong: Any = (
        (dict(window=0), r"^routing.window 0: give 1 or more$"),
        (dict(num_clusters=0), r"^routing.num_clusters 0: give 1 or more$"),
        (dict(num_kv_heads=1), r"^routing.num_kv_heads 1: queries and keys are the same"),
    )
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            RoutingAttentionConfig(**given)
    mixer, params = made(CONFIG, D)
    x, cache = normal(0, B, T, D), mixer.init_cache(B, T)
    with pytest.raises(
        ValueError, match=r"^mixer routing: decoding with a cache needs a causal mask"
    ):
        applied(mixer, params, x, cache=cache)
    mixer, params = made(BALANCED, D)
    with pytest.raises(
        ValueError, match=r"^mixer routing: balanced clusters depend on the whole row"
    ):
        applied(mixer, params, x, mask=Mask(MaskPattern(causal=True)))
    with pytest.raises(ValueError, match=r"^mixer routing: packed documents .* set balanced"):
        applied(mixer, params, x, mask=Mask(segments=DOCUMENTS))
