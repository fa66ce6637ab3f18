"""Every backend in bfloat16 against the formula in float64, within bounds derived from rounding.

A bfloat16 has 8 significant bits, so rounding changes a number by at most U = 2^-8 of it. Inputs
are
rounded before both computations. The errors that remain are

- y: the weights are rounded before the product with v, and the result is rounded once;
- dv: likewise;
- dq, dk: the gradient of the scores, P (dP - delta), is rounded before its product, the result is
rounded
  once, and delta = y . dy has the error of the rounded weights in y.

Everything else is in float32. So the bounds are 2 U and 3 U of the largest result.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.parallel.mesh import MeshConfig, make_mesh
from train.parallel.sharding import make_sharding_constraint
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import ScoreSpec, attend
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.ring import attend_ring
from transformer.attention.backends.splash import attend_splash
from transformer.attention.backends.tiling import merge_partials, widen
from transformer.attention.masks import dense_mask
from transformer.attention.position_bias import RelativeTables
from transformer.attention.scores import additive_scores
from transformer.attention.sparse_ops.balanced_clusters import attend_balanced_clusters
from transformer.attention.sparse_ops.block_gather import attend_selected_blocks
from transformer.attention.sparse_ops.global_tokens import (
    attend_from_packed_globals,
    attend_to_globals,
    attend_to_packed_globals,
)
from transformer.attention.sparse_ops.grouped_window import attend_grouped
from transformer.attention.sparse_ops.top_k_keys import attend_last_group_members, attend_top_k

Array = np.ndarray[Any, Any]

B, T, N, K, H = 2, 192, 4, 2, 24
SCALE = H**-0.5  # no power of two, so that scaling rounds too
U = 2.0**-8
BOUNDS = {"y": 2, "dq": 3, "dk": 3, "dv": 2}
CPU = Hardware("cpu")
CAP = 2.0
VECTOR = np.random.default_rng(1).normal(size=(N, H)).astype(np.float32)
GLOBALS = np.array([[0, 1, 2, 50]])


@functools.cache
def inputs(kv_heads: int, offset: float) -> tuple[Array, ...]:
    """Return q, k, v and dy in bfloat16. `offset` is added to all keys and values."""
    random = np.random.default_rng(0)
    q, k, v, dy = (random.normal(size=(B, T, heads, H)) for heads in (N, kv_heads, kv_heads, N))
    return tuple(each.astype(jnp.bfloat16) for each in (q, k + offset, v + offset, dy))


class Scores(NamedTuple):
    """Scores [B, N, T, S] of q [B, N, T, H] and k [B, N, S, H], and their VJP."""

    values: Array
    vjp: Callable[[Array], tuple[Array, Array]]


def dot_product_scores(q: Array, k: Array) -> Scores:
    return Scores(
        SCALE * q @ k.swapaxes(2, 3),
        lambda ds: (SCALE * ds @ k, SCALE * ds.swapaxes(2, 3) @ q),
    )


def capped_scores(q: Array, k: Array) -> Scores:
    """Return c tanh(score / c)."""
    uncapped = dot_product_scores(q, k)
    tanh = np.tanh(uncapped.values / CAP)
    return Scores(CAP * tanh, lambda ds: uncapped.vjp(ds * (1 - tanh**2)))


def mlp_scores(q: Array, k: Array) -> Scores:
    """Return w . tanh(q + k)."""
    tanh = np.tanh(q[:, :, :, None] + k[:, :, None])

    def vjp(ds: Array) -> tuple[Array, Array]:
        d_inner = ds[..., None] * VECTOR[None, :, None, None] * (1 - tanh**2)
        return d_inner.sum(3), d_inner.sum(2)

    return Scores((tanh * VECTOR[None, :, None, None]).sum(-1), vjp)


def expected_results(
    arrays_in: tuple[Array, ...],
    seen: Array,
    scores: Callable[[Array, Array], Scores] = dot_product_scores,
) -> tuple[Array, ...]:
    """Return y, dq, dk and dv from P = softmax(scores) and dscores = P (dP - sum over keys of P
    dP).
    """
    q, k, v, dy = (each.astype(np.float64).swapaxes(1, 2) for each in arrays_in)
    group = N // k.shape[1]
    k, v = (np.repeat(each, group, axis=1) for each in (k, v))
    scored = scores(q, k)
    masked_scores = np.where(seen, scored.values, -np.inf)
    row_max = np.where(seen.any(-1, keepdims=True), masked_scores.max(-1, keepdims=True), 0)
    exp_scores = np.exp(masked_scores - row_max)
    p = exp_scores / np.maximum(exp_scores.sum(-1, keepdims=True), 1e-300)
    dp = dy @ v.swapaxes(2, 3)
    dq, dk = scored.vjp(p * (dp - (p * dp).sum(-1, keepdims=True)))
    dv = p.swapaxes(2, 3) @ dy
    dk, dv = (each.reshape(B, -1, group, *each.shape[2:]).sum(2) for each in (dk, dv))
    return tuple(each.swapaxes(1, 2) for each in (p @ v, dq, dk, dv))


def window_mask(width: int) -> Mask:
    return Mask(MaskPattern(causal=True, window=width))


def run_backend(backend: Any, **score_options: Any) -> Any:
    spec_fields = {"scale": SCALE, **score_options}

    def run(q: Any, k: Any, v: Any, width: int) -> Any:
        return attend(
            q, k, v, window_mask(width), ScoreSpec(**spec_fields), backend=backend, hardware=CPU
        ).y

    return run


def run_ring(q: Any, k: Any, v: Any, width: int) -> Any:
    constrain = make_sharding_constraint(
        make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    )
    mask = window_mask(width).replace(positions=jnp.tile(jnp.arange(T), (B, 1)))
    return attend_ring(q, k, v, mask, ScoreSpec(SCALE), constrain, block_size=16).y


def run_splash(q: Any, k: Any, v: Any, width: int) -> Any:
    return attend_splash(q, k, v, window_mask(width), ScoreSpec(SCALE), interpret=True)


def run_merged(q: Any, k: Any, v: Any, width: int) -> Any:
    """Attend to even and odd keys separately, then merge both into one softmax."""
    wide_spec, wide_arrays = widen(ScoreSpec(SCALE), q, k, v)
    ones, odd = jnp.ones((1, T), int), (jnp.arange(T) % 2)[None]
    masks = [
        window_mask(width).replace(segments=ones, key_segments=each) for each in (odd, 1 - odd)
    ]
    return merge_partials(
        [attend_blockwise(*wide_arrays, mask, wide_spec) for mask in masks]
    ).y.astype(v.dtype)


def run_top_k(q: Any, k: Any, v: Any, width: int) -> Any:
    return attend_top_k(q, k, v, window_mask(width), ScoreSpec(SCALE), T, block_size=64)


def run_selected_blocks(q: Any, k: Any, v: Any, width: int) -> Any:
    """Attend with every query block selecting all key blocks."""
    blocks = jnp.broadcast_to(jnp.arange(T // 16), (1, 1, T // 16, T // 16))
    return attend_selected_blocks(q, k, v, window_mask(width), ScoreSpec(SCALE), blocks, 16).y


def run_grouped(q: Any, k: Any, v: Any, width: int) -> Any:
    """Attend with all tokens in one group."""
    k, v = (jnp.repeat(each, N // each.shape[2], axis=2) for each in (k, v))
    return attend_grouped(q, k, v, jnp.zeros((B, N, T), int), width, causal=True, scale=SCALE).y


def run_last_members(q: Any, k: Any, v: Any, width: int) -> Any:
    k, v = (jnp.repeat(each, N // each.shape[2], axis=2) for each in (k, v))
    groups = jnp.zeros((B, T, N), int)
    places = jnp.tile(jnp.arange(T), (B, 1))
    return attend_last_group_members(q, k, v, groups, groups, places, width, scale=SCALE)


BACKENDS: dict[str, Any] = {
    "reference": run_backend("reference"),
    "query blocks": run_backend("query_blocks"),
    "blockwise": run_backend("blockwise"),
    "ring": run_ring,
    "splash": run_splash,
    "merged": run_merged,
    "top k": run_top_k,
    "chosen blocks": run_selected_blocks,
    "grouped": run_grouped,
    "last members": run_last_members,
}
"""Functions `run(q, k, v, width)`. Each computes softmax attention under a causal window."""


def results_of(run: Any, arrays: tuple[Array, ...]) -> tuple[Any, ...]:
    def values_and_gradients(q: Any, k: Any, v: Any, dy: Any) -> Any:
        y, vjp_fn = jax.vjp(run, q, k, v)
        return y, *vjp_fn(dy)

    actual: tuple[Any, ...] = jax.device_get(jax.jit(values_and_gradients)(*arrays))
    assert all(each.dtype == jnp.bfloat16 for each in actual)
    return actual


def assert_within_bounds(actual: tuple[Array, ...], expected: tuple[Array, ...]) -> None:
    errors = {
        name: np.abs(value.astype(np.float64) - reference).max() / np.abs(reference).max() / U
        for name, value, reference in zip(BOUNDS, actual, expected, strict=True)
    }
    exceeded = {name: round(float(each), 1) for name, each in errors.items() if each > BOUNDS[name]}
    assert not exceeded, f"{exceeded} U, more than {BOUNDS}"


def dense_window(width: int) -> Array:  # [1, 1, T, T]
    return np.asarray(dense_mask(window_mask(width), T, T))[:, None]


@pytest.mark.full
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("width", "offset"), [(7, 4.0), (T, 4.0)])
def test_matches_float64_formula_within_rounding(name: str, width: int, offset: float) -> None:
    """The offset that all keys and values share must cancel. It is four times the rest."""
    if name == "splash" and offset:
        offset = 0.0  # JAX's splash kernel computes delta from a rounded y
    arrays, run = inputs(K, offset), functools.partial(BACKENDS[name], width=width)
    assert_within_bounds(results_of(run, arrays), expected_results(arrays, dense_window(width)))


@pytest.mark.full
@pytest.mark.parametrize("name", BACKENDS)
def test_query_with_one_visible_key_has_no_gradient(name: str) -> None:
    """A softmax over one key is 1 whatever the score.

    dP and delta are sums of the same H products dy . v, perhaps in a different order. Each float32
    sum is off by less than H 2^-24 times the sum of the absolute products.
    """
    arrays = inputs(K, 4.0)
    y, dq, dk, dv = results_of(functools.partial(BACKENDS[name], width=1), arrays)
    q, k, v, dy = (np.abs(each.astype(np.float64)) for each in arrays)
    v = np.repeat(v, N // K, axis=2)
    assert np.array_equal(np.abs(y), v)
    assert np.array_equal(dv, expected_results(arrays, dense_window(1))[3].astype(jnp.bfloat16))
    ds = 2 * H * 2.0**-24 * (dy * v).sum(-1).max()
    assert np.abs(dq).max() <= ds * SCALE * k.max() < 0.01
    assert np.abs(dk).max() <= ds * SCALE * q.max() * N / K < 0.01


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize(
    ("scores", "score_options"),
    [
        (capped_scores, {"soft_cap": CAP}),
        (mlp_scores, {"scale": 1.0, "score_fn": functools.partial(additive_scores, VECTOR)}),
    ],
    ids=["capped", "an MLP"],
)
def test_other_scores_match_formula(scores: Any, score_options: Any, backend: Any) -> None:
    arrays = inputs(K, 1.0)
    run = functools.partial(run_backend(backend, **score_options), width=7)
    assert_within_bounds(results_of(run, arrays), expected_results(arrays, dense_window(7), scores))


def to_globals(q: Any, k: Any, v: Any) -> Any:
    score_spec, wide_arrays = widen(ScoreSpec(SCALE), q, k, v)
    return attend_to_globals(*wide_arrays, PACK, score_spec, jnp.array(GLOBALS)).y.astype(v.dtype)


def to_globals_of_packs(q: Any, k: Any, v: Any) -> Any:
    return attend_to_packed_globals(q, k, v, PACK, ScoreSpec(SCALE), jnp.array(GLOBALS)).y


def rows_of_globals(q: Any, k: Any, v: Any) -> Any:
    zeros = jnp.zeros_like(q)
    return attend_from_packed_globals(zeros, q, k, v, PACK, ScoreSpec(SCALE), jnp.array(GLOBALS))


PACK = Mask(
    MaskPattern(causal=True),
    positions=np.arange(T)[None],  # type: ignore[arg-type]
    segments=np.ones((1, T), int),  # type: ignore[arg-type]
    key_segments=np.ones((1, T), int),  # type: ignore[arg-type]
)


@pytest.mark.full
@pytest.mark.parametrize("run", [to_globals, to_globals_of_packs, rows_of_globals])
def test_global_tokens(run: Any) -> None:
    arrays = inputs(K, 4.0)
    is_global = np.isin(np.arange(T), GLOBALS)
    is_global = is_global[:, None] if run is rows_of_globals else is_global[None, :]
    assert_within_bounds(
        results_of(run, arrays), expected_results(arrays, dense_window(T) & is_global)
    )


@pytest.mark.full
def test_overlapping_clusters_are_averaged() -> None:
    """Every token is in two clusters, and each cluster has half of its weight."""
    arrays = inputs(N, 1.0)
    members = jnp.broadcast_to(jnp.arange(T), (B, N, 2, T))

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend_balanced_clusters(q, k, v, members, members, jnp.ones((1, T), bool))

    assert_within_bounds(
        results_of(run, arrays), expected_results(arrays, np.ones((1, 1, T, T), bool))
    )


@pytest.mark.full
def test_relative_position_tables() -> None:
    """Table rows are rounded once more, in scores and in values: one U more for each."""
    arrays = inputs(K, 0.0)
    tables = np.random.default_rng(2).normal(size=(2, 9, H)).astype(jnp.bfloat16)
    distance = np.clip(np.arange(T)[None, :] - np.arange(T)[:, None] + 4, 0, 8)
    key_terms, value_terms = (each.astype(np.float64)[distance] for each in tables)
    q, k, v, dy = (each.astype(np.float64).swapaxes(1, 2) for each in arrays)
    k, v = (np.repeat(each, N // K, axis=1) for each in (k, v))
    scores = SCALE * (q @ k.swapaxes(2, 3) + np.einsum("BNTH,TSH->BNTS", q, key_terms))
    p = np.exp(scores) * dense_window(T)
    p /= p.sum(-1, keepdims=True)
    y = p @ v + np.einsum("BNTS,TSH->BNTH", p, value_terms)
    dp = dy @ v.swapaxes(2, 3) + np.einsum("BNTH,TSH->BNTS", dy, value_terms)
    ds = SCALE * p * (dp - (p * dp).sum(-1, keepdims=True))
    dq = ds @ k + np.einsum("BNTS,TSH->BNTH", ds, key_terms)

    def run(q: Any, k: Any, v: Any) -> Any:
        relative_tables = RelativeTables(*map(jnp.asarray, tables))
        score_spec = ScoreSpec(SCALE, relative_tables=relative_tables)
        return attend(q, k, v, window_mask(T), score_spec, backend="reference", hardware=CPU).y

    results = results_of(run, arrays)
    for actual, expected, bound in zip(results, (y, dq), (3, 4), strict=False):
        error = np.abs(actual.astype(np.float64) - expected.swapaxes(1, 2)).max()
        assert error <= bound * U * np.abs(expected).max()
