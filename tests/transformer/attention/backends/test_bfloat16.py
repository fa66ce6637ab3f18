"""Every backend in bfloat16 against the formula in float64, with bounds that roundings explain.

A bfloat16 has 8 significant bits: rounding is off by at most U = 2^-8 of the number. Inputs are
rounded before both computations, so what is left is

- y: the weights are rounded on their way into the product, and the result once;
- dv: likewise;
- dq, dk: the scores' gradient P (dP - delta) is rounded on its way into the product, and the result
  once; and delta = y . dy has what the weights lost on their way into y.

All else is in float32. So the bounds are 2 U and 3 U of the largest result.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.parallel.mesh import MeshConfig, make_mesh
from train.parallel.model_sharding import make_sharding_constraint
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
    """q, k, v and dy in bfloat16. With an offset, keys and values have much in common."""
    random = np.random.default_rng(0)
    q, k, v, dy = (random.normal(size=(B, T, heads, H)) for heads in (N, kv_heads, kv_heads, N))
    return tuple(each.astype(jnp.bfloat16) for each in (q, k + offset, v + offset, dy))


class Scores(NamedTuple):
    """Scores [B, N, T, S] of q [B, N, T, H] and k [B, N, S, H], and how gradients go back."""

    values: Array
    pull: Callable[[Array], tuple[Array, Array]]


def products(q: Array, k: Array) -> Scores:
    return Scores(
        SCALE * q @ k.swapaxes(2, 3),
        lambda ds: (SCALE * ds @ k, SCALE * ds.swapaxes(2, 3) @ q),
    )


def capped(q: Array, k: Array) -> Scores:
    """c tanh(score / c)."""
    plain = products(q, k)
    bent = np.tanh(plain.values / CAP)
    return Scores(CAP * bent, lambda ds: plain.pull(ds * (1 - bent**2)))


def additive(q: Array, k: Array) -> Scores:
    """w . tanh(q + k)."""
    bent = np.tanh(q[:, :, :, None] + k[:, :, None])

    def pull(ds: Array) -> tuple[Array, Array]:
        inner = ds[..., None] * VECTOR[None, :, None, None] * (1 - bent**2)
        return inner.sum(3), inner.sum(2)

    return Scores((bent * VECTOR[None, :, None, None]).sum(-1), pull)


def formula(
    given: tuple[Array, ...], seen: Array, scores: Callable[[Array, Array], Scores] = products
) -> tuple[Array, ...]:
    """y, dq, dk, dv: P = softmax(scores), dscores = P (dP - sum over keys of P dP)."""
    arrays = (each.astype(np.float64).swapaxes(1, 2) for each in given)
    q, k, v, dy = arrays
    group = N // k.shape[1]
    k, v = (np.repeat(each, group, axis=1) for each in (k, v))
    made = scores(q, k)
    shown = np.where(seen, made.values, -np.inf)
    top = np.where(seen.any(-1, keepdims=True), shown.max(-1, keepdims=True), 0)
    raised = np.exp(shown - top)
    p = raised / np.maximum(raised.sum(-1, keepdims=True), 1e-300)
    dp = dy @ v.swapaxes(2, 3)
    dq, dk = made.pull(p * (dp - (p * dp).sum(-1, keepdims=True)))
    dv = p.swapaxes(2, 3) @ dy
    dk, dv = (each.reshape(B, -1, group, *each.shape[2:]).sum(2) for each in (dk, dv))
    return tuple(each.swapaxes(1, 2) for each in (p @ v, dq, dk, dv))


def window(width: int) -> Mask:
    return Mask(MaskPattern(causal=True, window=width))


def by_form(form: Any, **scoring: Any) -> Any:
    how = {"scale": SCALE, **scoring}

    def run(q: Any, k: Any, v: Any, width: int) -> Any:
        return attend(q, k, v, window(width), ScoreSpec(**how), backend=form, hardware=CPU).y

    return run


def in_ring(q: Any, k: Any, v: Any, width: int) -> Any:
    constrain = make_sharding_constraint(
        make_mesh(MeshConfig(data=1, context=4), jax.devices()[:4])
    )
    mask = window(width).replace(positions=jnp.tile(jnp.arange(T), (B, 1)))
    return attend_ring(q, k, v, mask, ScoreSpec(SCALE), constrain, block_size=16).y


def splash(q: Any, k: Any, v: Any, width: int) -> Any:
    return attend_splash(q, k, v, window(width), ScoreSpec(SCALE), interpret=True)


def merged(q: Any, k: Any, v: Any, width: int) -> Any:
    """Attend to even and odd keys separately, and merge into one softmax."""
    scoring, given = widen(ScoreSpec(SCALE), q, k, v)
    ones, odd = jnp.ones((1, T), int), (jnp.arange(T) % 2)[None]
    masks = [window(width).replace(segments=ones, key_segments=each) for each in (odd, 1 - odd)]
    return merge_partials([attend_blockwise(*given, mask, scoring) for mask in masks]).y.astype(
        v.dtype
    )


def top_k(q: Any, k: Any, v: Any, width: int) -> Any:
    return attend_top_k(q, k, v, window(width), ScoreSpec(SCALE), T, block_size=64)


def chosen(q: Any, k: Any, v: Any, width: int) -> Any:
    """Every query block selects all key blocks."""
    blocks = jnp.broadcast_to(jnp.arange(T // 16), (1, 1, T // 16, T // 16))
    return attend_selected_blocks(q, k, v, window(width), ScoreSpec(SCALE), blocks, 16).y


def grouped(q: Any, k: Any, v: Any, width: int) -> Any:
    """All tokens are in one group."""
    k, v = (jnp.repeat(each, N // each.shape[2], axis=2) for each in (k, v))
    return attend_grouped(q, k, v, jnp.zeros((B, N, T), int), width, causal=True, scale=SCALE).y


def last_members(q: Any, k: Any, v: Any, width: int) -> Any:
    k, v = (jnp.repeat(each, N // each.shape[2], axis=2) for each in (k, v))
    groups = jnp.zeros((B, T, N), int)
    places = jnp.tile(jnp.arange(T), (B, 1))
    return attend_last_group_members(q, k, v, groups, groups, places, width, scale=SCALE)


BACKENDS: dict[str, Any] = {
    "reference": by_form("reference"),
    "query blocks": by_form("query_blocks"),
    "blockwise": by_form("blockwise"),
    "ring": in_ring,
    "splash": splash,
    "merged": merged,
    "top k": top_k,
    "chosen blocks": chosen,
    "grouped": grouped,
    "last members": last_members,
}
"""Each computes softmax attention under a causal window: `run(q, k, v, width)`."""


def both(run: Any, given: tuple[Array, ...]) -> tuple[Any, ...]:
    def values_and_gradients(q: Any, k: Any, v: Any, dy: Any) -> Any:
        y, pull = jax.vjp(run, q, k, v)
        return y, *pull(dy)

    found: tuple[Any, ...] = jax.device_get(jax.jit(values_and_gradients)(*given))
    assert all(each.dtype == jnp.bfloat16 for each in found)
    return found


def check(found: tuple[Array, ...], expected: tuple[Array, ...]) -> None:
    off = {
        name: np.abs(one.astype(np.float64) - other).max() / np.abs(other).max() / U
        for name, one, other in zip(BOUNDS, found, expected, strict=True)
    }
    over = {name: round(float(each), 1) for name, each in off.items() if each > BOUNDS[name]}
    assert not over, f"{over} U, more than {BOUNDS}"


def all_pairs(width: int) -> Array:  # [1, 1, T, T]
    return np.asarray(dense_mask(window(width), T, T))[:, None]


@pytest.mark.slow
@pytest.mark.sampled(*(f"7-4.0-{name}" for name in BACKENDS))
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("width", "offset"), [(7, 4.0), (T, 0.0), (T, 4.0)])
def test_each_is_the_formula_within_its_roundings(name: str, width: int, offset: float) -> None:
    """The common part of keys and values must cancel: here it is four times the rest."""
    if name == "splash" and offset:
        offset = 0.0  # the kernel, which is not ours, takes delta from a rounded y
    given, run = inputs(K, offset), functools.partial(BACKENDS[name], width=width)
    check(both(run, given), formula(given, all_pairs(width)))


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_a_query_that_sees_itself_alone_has_no_gradient(name: str) -> None:
    """A softmax over one key is 1 whatever the score.

    dP and delta are the same sum of H products, dy . v, in another order at most: each sum in
    float32 is off by less than H 2^-24 times the sum of its products' sizes.
    """
    given = inputs(K, 4.0)
    y, dq, dk, dv = both(functools.partial(BACKENDS[name], width=1), given)
    q, k, v, dy = (np.abs(each.astype(np.float64)) for each in given)
    v = np.repeat(v, N // K, axis=2)
    assert np.array_equal(np.abs(y), v)
    assert np.array_equal(dv, formula(given, all_pairs(1))[3].astype(jnp.bfloat16))
    ds = 2 * H * 2.0**-24 * (dy * v).sum(-1).max()
    assert np.abs(dq).max() <= ds * SCALE * k.max() < 0.01
    assert np.abs(dk).max() <= ds * SCALE * q.max() * N / K < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("form", ["reference", "blockwise"])
@pytest.mark.parametrize(
    ("scores", "scoring"),
    [
        (capped, {"soft_cap": CAP}),
        (additive, {"scale": 1.0, "score_fn": functools.partial(additive_scores, VECTOR)}),
    ],
    ids=["capped", "an MLP"],
)
def test_scores_of_other_kinds(scores: Any, scoring: Any, form: Any) -> None:
    given = inputs(K, 1.0)
    run = functools.partial(by_form(form, **scoring), width=7)
    check(both(run, given), formula(given, all_pairs(7), scores))


def to_globals(q: Any, k: Any, v: Any) -> Any:
    scoring, given = widen(ScoreSpec(SCALE), q, k, v)
    return attend_to_globals(*given, PACK, scoring, jnp.array(GLOBALS)).y.astype(v.dtype)


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


@pytest.mark.slow
@pytest.mark.parametrize("run", [to_globals, to_globals_of_packs, rows_of_globals])
def test_global_tokens(run: Any) -> None:
    given = inputs(K, 4.0)
    shown = np.isin(np.arange(T), GLOBALS)
    shown = shown[:, None] if run is rows_of_globals else shown[None, :]
    check(both(run, given), formula(given, all_pairs(T) & shown))


@pytest.mark.slow
def test_clusters_that_overlap() -> None:
    """Every token is in two of them: each counts for a half."""
    given = inputs(N, 1.0)
    members = jnp.broadcast_to(jnp.arange(T), (B, N, 2, T))

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend_balanced_clusters(q, k, v, members, members, jnp.ones((1, T), bool))

    check(both(run, given), formula(given, np.ones((1, 1, T, T), bool)))


@pytest.mark.slow
def test_tables_of_relative_positions() -> None:
    """Rows of the tables are rounded once more, in scores and in values: one U more for each."""
    given = inputs(K, 0.0)
    tables = np.random.default_rng(2).normal(size=(2, 9, H)).astype(jnp.bfloat16)
    distance = np.clip(np.arange(T)[None, :] - np.arange(T)[:, None] + 4, 0, 8)
    of_keys, of_values = (each.astype(np.float64)[distance] for each in tables)
    q, k, v, dy = (each.astype(np.float64).swapaxes(1, 2) for each in given)
    k, v = (np.repeat(each, N // K, axis=1) for each in (k, v))
    scores = SCALE * (q @ k.swapaxes(2, 3) + np.einsum("BNTH,TSH->BNTS", q, of_keys))
    p = np.exp(scores) * all_pairs(T)
    p /= p.sum(-1, keepdims=True)
    y = p @ v + np.einsum("BNTS,TSH->BNTH", p, of_values)
    dp = dy @ v.swapaxes(2, 3) + np.einsum("BNTH,TSH->BNTS", dy, of_values)
    ds = SCALE * p * (dp - (p * dp).sum(-1, keepdims=True))
    dq = ds @ k + np.einsum("BNTS,TSH->BNTH", ds, of_keys)

    def run(q: Any, k: Any, v: Any) -> Any:
        relative = RelativeTables(*map(jnp.asarray, tables))
        scoring = ScoreSpec(SCALE, relative_tables=relative)
        return attend(q, k, v, window(T), scoring, backend="reference", hardware=CPU).y

    found = both(run, given)
    for got, expected, bound in zip(found, (y, dq), (3, 4), strict=False):
        off = np.abs(got.astype(np.float64) - expected.swapaxes(1, 2)).max()
        assert off <= bound * U * np.abs(expected).max()
