"""Attention over a sequence whose tokens are spread over devices: keys and values travel in a ring.

Each device keeps its queries. Keys and values go from one to the next until all have met all, and
what was found is merged by a running softmax (Liu et al. 2023, "Ring Attention with Blockwise
Transformers", section 3). No device has more than two parts of the keys at once. The backward pass
sends keys and values around once more, and the sums of their gradients with them.

Which keys a query sees is told by positions and segments alone, which travel too: tokens may lie in
any order, and tiles that their masks hide are left out.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.attend.blockwise import (
    Looked,
    attend_blockwise,
    blockwise_gradients,
    softmax_shift,
)
from transformer.attend.merge import merge
from transformer.attend.parts import for_each_part
from transformer.attend.scoring import Scoring
from transformer.contract import split, wide
from transformer.dropout import fold
from transformer.masks import Mask, Pattern
from transformer.shared import Constrain


class _Ring(NamedTuple):
    """What a turn does; hashable."""

    axis: str  # of the mesh
    parts: int
    pattern: Pattern
    scoring: Scoring  # without keys
    block: int


class _Tokens(NamedTuple):
    """What is known of some tokens beside their vectors."""

    positions: jax.Array  # [B or 1, t]
    segments: jax.Array | None  # [B or 1, t]


def attend_ring(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H of values]
    mask: Mask,  # a pattern, positions, segments
    scoring: Scoring,  # products, soft cap
    constrain: Constrain,  # which splits T
    *,
    block: int,
) -> Looked:
    """The same numbers as `attend_reference`. Weights that are dropped depend on the parts of T."""
    mesh = constrain.mesh
    assert mesh is not None
    (axis,) = constrain.spec(("length",), q.shape[1:2])
    assert isinstance(axis, str)  # a ring goes along one axis
    k, v = (for_each_part(each, constrain.parts("heads")) for each in (k, v))
    tokens = _Tokens(mask.places(q.shape[1], k.shape[1])[0], mask.segments)
    ring = _Ring(axis, mesh.shape[axis], mask.pattern, scoring._replace(dropout_rngs=None), block)
    given = q, k, v, tokens, scoring.dropout_rngs
    heads, rows = ("batch", "length", "heads", None), ("batch", "heads", "length")
    lay: Any = lambda x, names: constrain.spec(names[: x.ndim], x.shape)  # noqa: E731
    specs = (
        lay(q, heads),
        lay(k, heads),
        lay(v, heads),
        jax.tree.map(lambda x: lay(x, ("batch", "length")), tokens),
        None if scoring.dropout_rngs is None else lay(scoring.dropout_rngs, ("batch",)),
    )
    b, t, n, _ = q.shape
    out: Any = Looked(lay(q, heads), constrain.spec(rows, (b, n, t)))  # type: ignore[arg-type]
    turn = functools.partial(_around, ring)
    return jax.shard_map(turn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(*given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _around(
    ring: _Ring,
    q: jax.Array,  # [b, t, n, H] of this device
    k: jax.Array,
    v: jax.Array,
    tokens: _Tokens,
    dropout_rngs: jax.Array | None,  # [b]
) -> Looked:
    y, lse = _found(ring, q, k, v, tokens, dropout_rngs)
    return Looked(y.astype(v.dtype), lse)


def _found(
    ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array, tokens: _Tokens, dropout_rngs: Any
) -> Looked:  # y not rounded
    b, t, n, _ = q.shape
    dtype = ring.scoring.softmax_dtype
    sums = wide(q.dtype, dtype)
    found = Looked(jnp.zeros((b, t, n, v.shape[-1]), sums), jnp.full((b, n, t), -jnp.inf, dtype))

    def visit(state: Any, turn: jax.Array) -> Any:
        found, there = state
        mask, scoring = _meeting(ring, tokens, there[2], dropout_rngs, turn)
        scoring, given = scoring.widened(q, *there[:2])
        here = attend_blockwise(*given, mask, scoring, block=ring.block, looks_first=True)
        found = merge([found, here])
        return (found, _passed_on(ring, there)), None

    turns = jnp.arange(ring.parts)
    (found, _), _ = jax.lax.scan(visit, (found, (k, v, tokens)), turns)
    return found


def _meeting(
    ring: _Ring, here: _Tokens, there: _Tokens, dropout_rngs: jax.Array | None, turn: jax.Array
) -> tuple[Mask, Scoring]:
    """The mask of these queries over those keys, and how they score."""
    mask = Mask(ring.pattern, positions=here.positions, segments=here.segments)
    mask = mask.over(there.positions, there.segments)
    place = jax.lax.axis_index(ring.axis)
    dropout_rngs = fold(fold(dropout_rngs, place), turn)
    return mask, ring.scoring._replace(dropout_rngs=dropout_rngs)


def _passed_on(ring: _Ring, things: Any) -> Any:
    """What the device before had."""
    pairs = [(part, (part + 1) % ring.parts) for part in range(ring.parts)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, pairs), things)


def _forward(
    ring: _Ring, q: Any, k: Any, v: Any, tokens: _Tokens, dropout_rngs: Any
) -> tuple[Looked, tuple[Any, ...]]:
    y, lse = _found(ring, q, k, v, tokens, dropout_rngs)
    y, rest = split(y, v.dtype)
    out = Looked(y, lse)
    return out, (q, k, v, tokens, dropout_rngs, out, rest)


def _backward(ring: _Ring, kept: Any, cotangent: Looked) -> Any:
    q, k, v, tokens, dropout_rngs, out, rest = kept
    dtype = wide(q.dtype, ring.scoring.softmax_dtype)
    shift = softmax_shift(out, rest, cotangent, q.dtype.name)

    def visit(state: Any, turn: jax.Array) -> Any:
        dq, there, sums = state
        mask, scoring = _meeting(ring, tokens, there[2], dropout_rngs, turn)
        given = q, *there[:2], mask, scoring, out.lse, cotangent.y, shift
        dq_here, *here = blockwise_gradients(*given, block=ring.block, looks_first=True)
        sums = [each + more for each, more in zip(sums, here, strict=True)]
        return (dq + dq_here, *_passed_on(ring, (there, sums))), None

    zeros = [jnp.zeros(x.shape, dtype) for x in (q, k, v)]
    start = zeros[0], (k, v, tokens), zeros[1:]
    (dq, _, (dk, dv)), _ = jax.lax.scan(visit, start, jnp.arange(ring.parts))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_around.defvjp(_forward, _backward)
