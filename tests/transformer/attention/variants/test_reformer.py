"""Reformer's attention against softmax with the same rotations, hashed and looked up in NumPy."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import applied, axes, made
from transformer import Mask, MaskPattern, ReformerConfig
from transformer.attention.mixer import MixerInputs
from transformer.attention.variants.reformer import Reformer, hash_buckets
from transformer.testing.contract import check_mixer
from transformer.testing.trial import projections

B, T, D, N, H, WINDOW, ROUNDS = 2, 71, 7, 2, 5, 3, 3
CONFIG = ReformerConfig(
    num_heads=N, head_dim=H, num_buckets=4, num_hashes=ROUNDS, window=WINDOW, seed=5
)
DOCUMENTS = array([[1] * 40 + [2] * 30 + [0], [0] + [3] * 3 + [7] * 67])
CONSTANTS = Reformer.constants(CONFIG, 1, D)


def hashed(q: Array, rotation: Array) -> Array:  # [T, H], [H, buckets / 2] -> [T]
    turned = q @ rotation
    return np.asarray(np.argmax(np.concatenate([turned, -turned], axis=-1), axis=-1))


def shown(bucket: Array, documents: Array, t: int, causal: bool) -> Array:  # [T] booleans
    """Return the last members of the query's bucket in its document, and as many after it."""
    index = np.arange(T)
    alike = index[(bucket == bucket[t]) & (documents == documents[t]) & (documents[t] != 0)]
    before, after = alike[alike <= t][-WINDOW:], alike[alike > t][: WINDOW - 1]
    return np.isin(index, before) | (np.isin(index, after) & (not causal))


def pattern(q: Array, documents: Array, causal: bool) -> Array:  # [B, T, N, H] -> [R, B, N, T, T]
    """Return the keys that each query sees in each round of hashing."""
    found = np.zeros((ROUNDS, B, N, T, T), bool)
    for r, b, n in np.ndindex(ROUNDS, B, N):
        bucket = hashed(q[b, :, n], CONSTANTS["rotations"][r, n])
        for t in range(T):
            found[r, b, n, t] = shown(bucket, documents[b], t, causal)
    return found


def round_by_round(q: Any, v: Any, seen: Any) -> Any:
    """Equations 3 to 6: each round's softmax, and their sum by shares of the whole."""
    k = q / jnp.sqrt(jnp.mean(q**2, axis=-1, keepdims=True) + 1e-6)
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(H)
    scores = scores - np.log(np.maximum(seen.sum(0), 1))
    others = seen & ~np.eye(T, dtype=bool)
    alone = seen.any(-1) & ~others.any(-1)  # in this round
    raised = jnp.exp(scores)[None] * others
    # A token sees itself where no round shows anything else: 1e-12 vanishes beside all others.
    raised = raised + 1e-12 * (np.eye(T) * alone[..., None])
    total = raised.sum(-1)
    found = jnp.einsum("RBNTS,BSNH->RBTNH", raised / jnp.where(total > 0, total, 1)[..., None], v)
    shares = total / jnp.where(total.sum(0) > 0, total.sum(0), 1)[None]
    return jnp.einsum("RBTNH,RBNT->BTNH", found, shares)


def dense(params: Any, x: Any, documents: Any, causal: bool) -> Any:
    """Return the mixer's output by dense attention."""

    def project(p: Any, name: str) -> Any:
        return jnp.einsum("BTD,DNH->BTNH", x, p[name]) + p[f"{name}_bias"][None, None]

    seen = pattern(np.asarray(project(params, "query")), documents, causal)

    def run(params: Any) -> Any:
        y = round_by_round(project(params, "query"), project(params, "value"), seen)
        return jnp.einsum("BTNH,NHD->BTD", y, params["output"]) + params["output_bias"][None, None]

    return run


@pytest.mark.slow
@pytest.mark.sampled("True")
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients_round_by_round(causal: bool) -> None:
    mixer, params = made(CONFIG, D, constants=CONSTANTS)
    x = normal(1, B, T, D)
    given: Any = dict(
        mask=Mask(MaskPattern(causal=causal), segments=DOCUMENTS), constants=CONSTANTS
    )

    def probed(f: Any) -> Any:  # y and the gradients
        def probe(p: Any) -> tuple[jax.Array, jax.Array]:
            y = f(p)
            return jnp.sum(jnp.sin(y)), y

        (_, y), found = jax.jit(jax.value_and_grad(probe, has_aux=True))(params)
        return y, found

    y, got = probed(lambda p: applied(mixer, p, x, **given).y)
    right, expected = probed(dense(params, x, DOCUMENTS, causal))
    assert_close(y, right)
    for name, each in expected.items():
        assert_close(got[name], each)


@pytest.mark.full
def test_the_contract_with_many_tokens_to_a_bucket() -> None:
    config = ReformerConfig(num_heads=3, head_dim=4, num_buckets=2, num_hashes=2, window=5)
    check_mixer(config, d_model=7, length=71, lengths=(1, 71))


def chunked(bucket: Array, t: int, size: int) -> set[int]:
    """Return the keys that a query sees in the paper: members of its bucket up to itself, in
    its own chunk of the sorted row and the one before."""
    order = np.argsort(bucket, kind="stable")
    chunk = np.argsort(order) // size
    near = (chunk == chunk[t]) | (chunk == chunk[t] - 1)
    return set(np.flatnonzero(near & (bucket == bucket[t]) & (np.arange(len(bucket)) <= t)))


def test_chunks_of_the_sorted_row_leak_the_future_and_the_last_members_do_not() -> None:
    """One later token goes to another bucket: the keys of earlier queries change with chunks."""
    before, after = np.array([1, 1, 1, 1, 1, 1, 1, 0]), np.array([1, 1, 1, 1, 1, 1, 1, 2])
    assert chunked(before, 6, 2) == {3, 4, 5, 6}
    assert chunked(after, 6, 2) == {4, 5, 6}
    documents = np.ones(T, int)
    long = [np.pad(bucket, (0, T - 8), constant_values=3) for bucket in (before, after)]
    for t in range(7):
        first, other = (shown(bucket, documents, t, True)[:7] for bucket in long)
        assert np.array_equal(first, other)


def test_a_token_sees_itself_only_where_there_is_nothing_else() -> None:
    mixer, params = made(CONFIG, D, constants=CONSTANTS)
    x = normal(1, B, T, D)
    mask = Mask(MaskPattern(causal=True))
    inputs = MixerInputs(array([np.arange(T)]), mask, constants=CONSTANTS)
    heads = projections(mixer, params, x, inputs)
    seen = np.asarray(jax.jit(cast(Any, mixer).select)(heads, inputs))
    itself = np.diagonal(seen, axis1=-2, axis2=-1)
    others = (seen & ~np.eye(T, dtype=bool)).any(-1)
    assert itself[:, :, 0].all()
    assert np.array_equal(itself, ~others)
    assert others.mean() > 0.5


def recall(rounds: int) -> float:
    """The share of softmax weight on what the rounds show, of vectors with near neighbours."""
    random = np.random.default_rng(0)
    count, width = 256, 16
    middles = random.normal(size=(32, width))
    q = middles[random.integers(0, 32, count)] + 0.3 * random.normal(size=(count, width))
    rotations = random.normal(size=(rounds, 1, width, 8)).astype(np.float32)
    found = np.asarray(hash_buckets(array(np.float32(q))[None, :, None], jnp.asarray(rotations)))
    alike = (found[:, 0, 0, :, None] == found[:, 0, 0, None, :]).any(0)
    scores = q @ (q / np.linalg.norm(q, axis=-1, keepdims=True)).T * 2
    weights = np.exp(scores) * ~np.eye(count, dtype=bool)
    return float((weights * alike).sum() / weights.sum())


def test_more_rounds_find_more_of_what_full_attention_weighs() -> None:
    found = [recall(rounds) for rounds in (1, 2, 4, 8)]
    assert found == sorted(found)
    assert found[0] < 0.75
    assert found[-1] > 0.95


def test_rotations_are_a_function_of_seed_and_layer() -> None:
    make = lambda seed, layer: Reformer.constants(  # noqa: E731
        ReformerConfig(num_heads=N, head_dim=H, seed=seed), layer, D
    )["rotations"]
    assert make(0, 0).shape == (4, N, H, 16)
    assert np.array_equal(make(3, 2), make(3, 2))
    assert not np.array_equal(make(3, 2), make(3, 1))
    assert not np.array_equal(make(3, 2), make(2, 2))


def test_costs() -> None:
    """Two of four buckets' directions, and the keys that a window of 3 shows: 139 / 71 a side."""
    each, near = 2 * N * H, 139 / 71
    full, causal = (round(2 * each * seen) for seen in (2 * near + 1, near + 1))
    expected = ROUNDS * (2 * each + full), ROUNDS * (2 * each + causal)
    assert Reformer.score_flops(CONFIG, D, T) == expected


def test_weights_and_errors() -> None:
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
    mixer, params = made(CONFIG, D, constants=CONSTANTS)
    with pytest.raises(ValueError, match=r"^mixer reformer: has no cache; decode with"):
        mixer.init_cache(B, T)
    window = Mask(MaskPattern(window=3))
    with pytest.raises(ValueError, match=r"^mixer reformer: does not support a window"):
        applied(mixer, params, normal(0, B, T, D), mask=window, constants=CONSTANTS)
