"""Every backend in bfloat16 against the reference in float32, within bounds derived from rounding.

A bfloat16 has 8 significant bits, so rounding changes a number by at most U = 2^-8 of it. Inputs
are rounded before both computations. The errors that remain are

- y: the weights are rounded before the product with v, and the result is rounded once;
- dv: likewise;
- dq, dk: the gradient of the scores, P (dP - delta), is rounded before its product, the result is
  rounded once, and delta = y . dy has the error of the rounded weights in y.

Everything else is in float32. So the bounds are 2 U and 3 U of the largest result.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array
from train.parallel.mesh import MeshConfig, make_mesh
from train.parallel.sharding import make_sharding_constraint
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import attend
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.partial import merge_partials, widen
from transformer.attention.backends.ring import attend_ring
from transformer.attention.backends.splash import attend_splash
from transformer.attention.position_bias import RelativeTables
from transformer.attention.reference import ScoreSpec, attend_reference
from transformer.attention.scores import additive_scores
from transformer.attention.sparse_ops.block_gather import attend_selected_blocks
from transformer.attention.sparse_ops.global_tokens import (
    attend_from_document_globals,
    attend_to_document_globals,
    attend_to_tokens,
    find_document_globals,
)
from transformer.attention.sparse_ops.grouped_window import attend_grouped
from transformer.attention.sparse_ops.mask_tokens import Tokens
from transformer.attention.variants.routing_attention import (
    attend_balanced_clusters,
    attend_last_group_members,
)
from transformer.attention.variants.top_k import attend_top_k

pytestmark = pytest.mark.full

B, T, N, K, H = 2, 192, 4, 2, 24
SCALE = H**-0.5  # no power of two, so that scaling rounds too
SPEC = ScoreSpec(SCALE)
U = 2.0**-8
BOUNDS = (2, 3, 3, 2)  # of y, dq, dk and dv
GLOBALS = np.array([[0, 1, 2, 50]])


@functools.cache
def inputs(kv_heads: int, offset: float) -> tuple[Array, ...]:
    """Return q, k, v and dy in bfloat16. `offset` is added to all keys and values."""
    random = np.random.default_rng(0)
    q, k, v, dy = (random.normal(size=(B, T, heads, H)) for heads in (N, kv_heads, kv_heads, N))
    return tuple(each.astype(jnp.bfloat16) for each in (q, k + offset, v + offset, dy))


def results_of(run: Any, arrays: tuple[Any, ...]) -> tuple[Array, ...]:
    """Return y, dq, dk and dv."""

    def values_and_gradients(q: Any, k: Any, v: Any, dy: Any) -> Any:
        y, vjp_fn = jax.vjp(run, q, k, v)
        return y, *vjp_fn(dy)

    results: tuple[Array, ...] = jax.device_get(jax.jit(values_and_gradients)(*arrays))
    return results


def expected_results(
    arrays: tuple[Array, ...], mask: Mask, spec: ScoreSpec = SPEC
) -> tuple[Array, ...]:
    wide = tuple(each.astype(np.float32) for each in arrays)
    return results_of(lambda q, k, v: attend_reference(q, k, v, mask, spec)[0], wide)


def assert_within_bounds(
    run: Any, arrays: tuple[Array, ...], expected: tuple[Array, ...], bounds: Any = BOUNDS
) -> None:
    actual = results_of(run, arrays)
    assert all(each.dtype == jnp.bfloat16 for each in actual)
    errors = [
        np.abs(value.astype(np.float32) - reference).max() / np.abs(reference).max() / U
        for value, reference in zip(actual, expected, strict=True)
    ]
    assert (np.array(errors) <= bounds).all(), errors


def window_mask(width: int) -> Mask:
    return Mask(MaskPattern(causal=True, window=width))


def run_backend(backend: Any, spec: ScoreSpec = SPEC) -> Any:
    def run(q: Any, k: Any, v: Any, width: int) -> Any:
        return attend(
            q, k, v, window_mask(width), spec, backend=backend, hardware=Hardware("cpu")
        ).y

    return run


def run_ring(q: Any, k: Any, v: Any, width: int) -> Any:
    constrain = make_sharding_constraint(
        make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    )
    mask = window_mask(width).replace(positions=jnp.tile(jnp.arange(T), (B, 1)))
    return attend_ring(q, k, v, mask, SPEC, constrain, block_size=16).y


def run_splash(q: Any, k: Any, v: Any, width: int) -> Any:
    return attend_splash(q, k, v, window_mask(width), SPEC, interpret=True)


def run_merged(q: Any, k: Any, v: Any, width: int) -> Any:
    """Attend to even and odd keys separately, then merge both into one softmax."""
    wide_spec, wide_arrays = widen(SPEC, q, k, v)
    ones, odd = jnp.ones((1, T), int), (jnp.arange(T) % 2)[None]
    masks = [
        window_mask(width).replace(segments=ones, key_segments=each) for each in (odd, 1 - odd)
    ]
    partials = [attend_blockwise(*wide_arrays, mask, wide_spec) for mask in masks]
    return merge_partials(partials).y.astype(v.dtype)


def run_top_k(q: Any, k: Any, v: Any, width: int) -> Any:
    return attend_top_k(q, k, v, window_mask(width), SPEC, T, block_size=64)


def run_selected_blocks(q: Any, k: Any, v: Any, width: int) -> Any:
    """Attend with every query block selecting all key blocks."""
    blocks = jnp.broadcast_to(jnp.arange(T // 16), (1, 1, T // 16, T // 16))
    return attend_selected_blocks(q, k, v, window_mask(width), SPEC, blocks, 16).y


def run_grouped(q: Any, k: Any, v: Any, width: int) -> Any:
    """Attend with all tokens in one group."""
    k, v = (jnp.repeat(each, N // K, axis=2) for each in (k, v))
    return attend_grouped(q, k, v, jnp.zeros((B, N, T), int), width, causal=True, scale=SCALE).y


def run_last_members(q: Any, k: Any, v: Any, width: int) -> Any:
    k, v = (jnp.repeat(each, N // K, axis=2) for each in (k, v))
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


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("width", [7, T])
def test_error_is_that_of_rounding(name: str, width: int) -> None:
    """The offset that all keys and values share must cancel. It is four times the rest."""
    # JAX's splash kernel computes delta from a rounded y.
    arrays = inputs(K, 0.0 if name == "splash" else 4.0)
    run = functools.partial(BACKENDS[name], width=width)
    assert_within_bounds(run, arrays, expected_results(arrays, window_mask(width)))


@pytest.mark.parametrize("name", BACKENDS)
def test_query_with_one_visible_key_has_no_gradient(name: str) -> None:
    """A softmax over one key is 1 whatever the score.

    dP and delta are sums of the same H products dy . v, perhaps in a different order. Each float32
    sum is off by less than H 2^-24 times the sum of the absolute products.
    """
    arrays = inputs(K, 4.0)
    y, dq, dk, dv = results_of(functools.partial(BACKENDS[name], width=1), arrays)
    q, k, v, dy = (each.astype(np.float64) for each in arrays)
    v = np.repeat(v, N // K, axis=2)
    assert np.array_equal(y, v)
    assert np.array_equal(dv, dy.reshape(B, T, K, N // K, H).sum(3).astype(jnp.bfloat16))
    ds = 2 * H * 2.0**-24 * np.abs(dy * v).sum(-1).max()
    assert np.abs(dq).max() <= ds * SCALE * np.abs(k).max() < 0.01
    assert np.abs(dk).max() <= ds * SCALE * np.abs(q).max() * N / K < 0.01


VECTOR = np.random.default_rng(1).normal(size=(N, H)).astype(np.float32)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize(
    "spec",
    [
        ScoreSpec(SCALE, soft_cap=2.0),
        ScoreSpec(1.0, score_fn=functools.partial(additive_scores, VECTOR)),
    ],
    ids=["capped", "an MLP"],
)
def test_other_scores(spec: ScoreSpec, backend: Any) -> None:
    arrays = inputs(K, 1.0)
    run = functools.partial(run_backend(backend, spec), width=7)
    assert_within_bounds(run, arrays, expected_results(arrays, window_mask(7), spec))


def test_relative_position_tables() -> None:
    """Table rows are rounded once more, in scores and in values: one U more for each."""
    arrays = inputs(K, 0.0)
    tables = np.random.default_rng(2).normal(size=(2, 9, H)).astype(jnp.bfloat16)
    spec, wide = (
        ScoreSpec(SCALE, relative_tables=RelativeTables(*map(jnp.asarray, each)))
        for each in (tables, tables.astype(np.float32))
    )
    run = functools.partial(run_backend("reference", spec), width=T)
    bounds = np.array(BOUNDS) + 1
    assert_within_bounds(run, arrays, expected_results(arrays, window_mask(T), wide), bounds)


def to_globals(q: Any, k: Any, v: Any) -> Any:
    score_spec, wide_arrays = widen(SPEC, q, k, v)
    return attend_to_tokens(*wide_arrays, PACK, score_spec, jnp.array(GLOBALS)).y.astype(v.dtype)


def to_globals_of_packs(q: Any, k: Any, v: Any) -> Any:
    return attend_to_document_globals(q, k, v, PACK, SPEC, document_globals()).y


def rows_of_globals(q: Any, k: Any, v: Any) -> Any:
    return attend_from_document_globals(q, k, v, PACK, SPEC, document_globals())


def document_globals() -> jax.Array:
    tokens = Tokens(jnp.arange(T)[None], jnp.ones((1, T), int))
    return find_document_globals(tokens, jnp.array(GLOBALS))


PACK = Mask(
    MaskPattern(causal=True),
    positions=np.arange(T)[None],  # type: ignore[arg-type]
    segments=np.ones((1, T), int),  # type: ignore[arg-type]
    key_segments=np.ones((1, T), int),  # type: ignore[arg-type]
)


@pytest.mark.parametrize("run", [to_globals, to_globals_of_packs, rows_of_globals])
def test_global_tokens(run: Any) -> None:
    arrays, is_global = inputs(K, 4.0), np.isin(np.arange(T), GLOBALS)
    allowed = np.zeros((1, T, T), bool)
    allowed[:, is_global] = run is rows_of_globals
    allowed[:, :, is_global] |= run is not rows_of_globals
    mask = Mask(MaskPattern(causal=True), allowed=jnp.array(allowed))
    assert_within_bounds(run, arrays, expected_results(arrays, mask))


def test_overlapping_clusters_are_averaged() -> None:
    """Every token is in two clusters, and each cluster has half of its weight."""
    arrays = inputs(N, 1.0)
    members = jnp.broadcast_to(jnp.arange(T), (B, N, 2, T))

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend_balanced_clusters(q, k, v, members, members)

    assert_within_bounds(run, arrays, expected_results(arrays, Mask()))
