"""Reformer's attention against softmax in NumPy with the same hash rotations."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer, project_and_select
from transformer import Mask, MaskPattern, ReformerConfig
from transformer.attention.mixer import MixerInputs
from transformer.attention.variants.reformer import Reformer, hash_buckets
from transformer.testing.contract import check_mixer

B, T, D, N, H, WINDOW, ROUNDS = 2, 71, 7, 2, 5, 3, 3
CONFIG = ReformerConfig(
    num_heads=N, head_dim=H, num_buckets=4, num_hashes=ROUNDS, window=WINDOW, seed=5
)
DOCUMENTS = array([[1] * 40 + [2] * 30 + [0], [0] + [3] * 3 + [7] * 67])
CONSTANTS = Reformer.constants(CONFIG, 1, D)


def bucket_of_tokens(q: Array, rotation: Array) -> Array:  # [T, H], [H, buckets / 2] -> [T]
    rotated = q @ rotation
    return np.asarray(np.argmax(np.concatenate([rotated, -rotated], axis=-1), axis=-1))


def visible_keys(bucket: Array, documents: Array, t: int, causal: bool) -> Array:  # [T] booleans
    """Return the keys query t sees: the last members of its bucket and document, and as many after
    it.
    """
    index = np.arange(T)
    same_bucket = index[(bucket == bucket[t]) & (documents == documents[t]) & (documents[t] != 0)]
    before, after = (
        same_bucket[same_bucket <= t][-WINDOW:],
        same_bucket[same_bucket > t][: WINDOW - 1],
    )
    return np.isin(index, before) | (np.isin(index, after) & (not causal))


def visible_per_round(
    q: Array, documents: Array, causal: bool
) -> Array:  # [B, T, N, H] -> [R, B, N, T, T]
    """Return the keys that each query sees in each round of hashing."""
    actual = np.zeros((ROUNDS, B, N, T, T), bool)
    for r, b, n in np.ndindex(ROUNDS, B, N):
        bucket = bucket_of_tokens(q[b, :, n], CONSTANTS["rotations"][r, n])
        for t in range(T):
            actual[r, b, n, t] = visible_keys(bucket, documents[b], t, causal)
    return actual


def expected_attention(q: Any, v: Any, seen: Any) -> Any:
    """Compute equations 3 to 6: the softmax of each round, and their sum weighted by shares of the
    total.
    """
    k = q / jnp.sqrt(jnp.mean(q**2, axis=-1, keepdims=True) + 1e-6)
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(H)
    scores = scores - np.log(np.maximum(seen.sum(0), 1))
    others = seen & ~np.eye(T, dtype=bool)
    only_self = seen.any(-1) & ~others.any(-1)  # in this round
    raised = jnp.exp(scores)[None] * others
    # A token sees itself if no round shows anything else: 1e-12 vanishes beside all others.
    raised = raised + 1e-12 * (np.eye(T) * only_self[..., None])
    total = raised.sum(-1)
    actual = jnp.einsum("RBNTS,BSNH->RBTNH", raised / jnp.where(total > 0, total, 1)[..., None], v)
    shares = total / jnp.where(total.sum(0) > 0, total.sum(0), 1)[None]
    return jnp.einsum("RBTNH,RBNT->BTNH", actual, shares)


def expected_output(params: Any, x: Any, documents: Any, causal: bool) -> Any:
    """Return the mixer's output by dense attention."""

    def project(p: Any, name: str) -> Any:
        return jnp.einsum("BTD,DNH->BTNH", x, p[name]) + p[f"{name}_bias"][None, None]

    visible = visible_per_round(np.asarray(project(params, "query")), documents, causal)

    def run(params: Any) -> Any:
        y = expected_attention(project(params, "query"), project(params, "value"), visible)
        return jnp.einsum("BTNH,NHD->BTD", y, params["output"]) + params["output_bias"][None, None]

    return run


@pytest.mark.sampled("True")
@pytest.mark.parametrize("causal", [True, False])
def test_matches_rounds_of_dense_attention(causal: bool) -> None:
    mixer, params = make_mixer(CONFIG, D, constants=CONSTANTS)
    x = normal(1, B, T, D)
    kwargs: Any = dict(
        mask=Mask(MaskPattern(causal=causal), segments=DOCUMENTS), constants=CONSTANTS
    )

    def value_and_gradients(f: Any) -> Any:  # y and the gradients
        def weighted_sum(p: Any) -> tuple[jax.Array, jax.Array]:
            y = f(p)
            return jnp.sum(jnp.sin(y)), y

        (_, y), actual = jax.jit(jax.value_and_grad(weighted_sum, has_aux=True))(params)
        return y, actual

    y, gradients = value_and_gradients(lambda p: apply_mixer(mixer, p, x, **kwargs).y)
    expected_y, expected_gradients = value_and_gradients(
        expected_output(params, x, DOCUMENTS, causal)
    )
    assert_close(y, expected_y)
    for name, each in expected_gradients.items():
        assert_close(gradients[name], each)


@pytest.mark.nightly
def test_contract_with_many_tokens_per_bucket() -> None:
    config = ReformerConfig(num_heads=3, head_dim=4, num_buckets=2, num_hashes=2, window=5)
    check_mixer(config, d_model=7, length=71, lengths=(1, 71))


def keys_in_chunks(bucket: Array, t: int, size: int) -> set[int]:
    """Return the keys that a query sees in the paper: members of its bucket up to itself, in its
    own and
    the previous chunk of the sorted row.
    """
    order = np.argsort(bucket, kind="stable")
    chunk = np.argsort(order) // size
    in_chunks = (chunk == chunk[t]) | (chunk == chunk[t] - 1)
    return set(np.flatnonzero(in_chunks & (bucket == bucket[t]) & (np.arange(len(bucket)) <= t)))


def test_sorted_chunks_leak_the_future_but_last_members_do_not() -> None:
    """When one later token moves to another bucket, chunks change the keys of earlier queries."""
    before, after = np.array([1, 1, 1, 1, 1, 1, 1, 0]), np.array([1, 1, 1, 1, 1, 1, 1, 2])
    assert keys_in_chunks(before, 6, 2) == {3, 4, 5, 6}
    assert keys_in_chunks(after, 6, 2) == {4, 5, 6}
    documents = np.ones(T, int)
    long = [np.pad(bucket, (0, T - 8), constant_values=3) for bucket in (before, after)]
    for t in range(7):
        first, other = (visible_keys(bucket, documents, t, True)[:7] for bucket in long)
        assert np.array_equal(first, other)


def test_token_sees_itself_only_if_nothing_else_is_visible() -> None:
    mixer, params = make_mixer(CONFIG, D, constants=CONSTANTS)
    x = normal(1, B, T, D)
    mask = Mask(MaskPattern(causal=True))
    inputs = MixerInputs(array([np.arange(T)]), mask, constants=CONSTANTS)
    _, visible = project_and_select(mixer, params, x, inputs)
    itself = np.diagonal(visible, axis1=-2, axis2=-1)
    others = (visible & ~np.eye(T, dtype=bool)).any(-1)
    assert itself[:, :, 0].all()
    assert np.array_equal(itself, ~others)
    assert others.mean() > 0.5


def recalled_weight(rounds: int) -> float:
    """Return the fraction of softmax weight on keys that the rounds show, for clustered vectors."""
    random = np.random.default_rng(0)
    count, width = 256, 16
    centers = random.normal(size=(32, width))
    q = centers[random.integers(0, 32, count)] + 0.3 * random.normal(size=(count, width))
    rotations = random.normal(size=(rounds, 1, width, 8)).astype(np.float32)
    actual = np.asarray(hash_buckets(array(np.float32(q))[None, :, None], jnp.asarray(rotations)))
    same_bucket = (actual[:, 0, 0, :, None] == actual[:, 0, 0, None, :]).any(0)
    scores = q @ (q / np.linalg.norm(q, axis=-1, keepdims=True)).T * 2
    weights = np.exp(scores) * ~np.eye(count, dtype=bool)
    return float((weights * same_bucket).sum() / weights.sum())


def test_more_rounds_recall_more_softmax_weight() -> None:
    actual = [recalled_weight(rounds) for rounds in (1, 2, 4, 8)]
    assert actual == sorted(actual)
    assert actual[0] < 0.75
    assert actual[-1] > 0.95


def test_rotations_depend_on_seed_and_layer() -> None:
    make = lambda seed, layer: Reformer.constants(  # noqa: E731
        ReformerConfig(num_heads=N, head_dim=H, seed=seed), layer, D
    )["rotations"]
    assert make(0, 0).shape == (4, N, H, 16)
    assert np.array_equal(make(3, 2), make(3, 2))
    assert not np.array_equal(make(3, 2), make(3, 1))
    assert not np.array_equal(make(3, 2), make(2, 2))


def test_flops() -> None:
    """The rotation onto half of the four buckets, and the keys within a window of 3: 139 / 71 on
    each side.
    """
    flops_per_key, keys_per_side = 2 * N * H, 139 / 71
    full, causal = (
        round(2 * flops_per_key * seen) for seen in (2 * keys_per_side + 1, keys_per_side + 1)
    )
    expected = ROUNDS * (2 * flops_per_key + full), ROUNDS * (2 * flops_per_key + causal)
    assert Reformer.score_flops(CONFIG, D, T) == expected


def test_weights_and_invalid_configs() -> None:
    names = axes(CONFIG, D, constants=CONSTANTS)
    assert "key" not in names
    assert names["output"] == ("heads", "head", "embed")
    wrong: Any = (
        (dict(num_buckets=3), r"^reformer.num_buckets 3: buckets come in .*; give an even number$"),
        (dict(num_hashes=0), r"^reformer.num_hashes 0: give 1 or more$"),
        (dict(num_kv_heads=1), r"^reformer.num_kv_heads 1: queries and keys are the same"),
    )
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            ReformerConfig(**given)
    mixer, params = make_mixer(CONFIG, D, constants=CONSTANTS)
    with pytest.raises(ValueError, match=r"^mixer reformer: has no cache; decode with"):
        mixer.init_cache(B, T)
    window = Mask(MaskPattern(window=3))
    with pytest.raises(ValueError, match=r"^mixer reformer: does not support a window"):
        apply_mixer(mixer, params, normal(0, B, T, D), mask=window, constants=CONSTANTS)
