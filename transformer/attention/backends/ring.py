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

from transformer.attention.backends.blockwise import (
    PartialAttention,
    attend_blockwise,
    blockwise_gradients,
    softmax_grad_delta,
)
from transformer.attention.backends.merge import merge_partials, repeat_kv_for_shards
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.score_spec import ScoreSpec
from transformer.context import ActivationConstraint
from transformer.layers.dropout import fold_in
from transformer.layers.precise_einsum import accumulation_dtype, split_high_low


class _Ring(NamedTuple):
    """What a turn does; hashable."""

    axis: str  # of the mesh
    parts: int
    pattern: MaskPattern
    scoring: ScoreSpec  # without keys
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
    score_spec: ScoreSpec,  # products, soft cap
    constrain: ActivationConstraint,  # which splits T
    *,
    block_size: int,
) -> PartialAttention:
    """The same numbers as `attend_reference`. Weights that are dropped depend on the parts of T."""
    mesh = constrain.mesh
    assert mesh is not None
    (axis,) = constrain.partition_spec(("length",), q.shape[1:2])
    assert isinstance(axis, str)  # a ring goes along one axis
    k, v = (repeat_kv_for_shards(each, constrain.num_shards("heads")) for each in (k, v))
    tokens = _Tokens(mask.resolved_positions(q.shape[1], k.shape[1])[0], mask.segments)
    ring = _Ring(
        axis, mesh.shape[axis], mask.pattern, score_spec._replace(dropout_rngs=None), block_size
    )
    given = q, k, v, tokens, score_spec.dropout_rngs
    heads, rows = ("batch", "length", "heads", None), ("batch", "heads", "length")
    lay: Any = lambda x, names: constrain.partition_spec(names[: x.ndim], x.shape)  # noqa: E731
    specs = (
        lay(q, heads),
        lay(k, heads),
        lay(v, heads),
        jax.tree.map(lambda x: lay(x, ("batch", "length")), tokens),
        None if score_spec.dropout_rngs is None else lay(score_spec.dropout_rngs, ("batch",)),
    )
    b, t, n, _ = q.shape
    out: Any = PartialAttention(lay(q, heads), constrain.partition_spec(rows, (b, n, t)))  # type: ignore[arg-type]
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
) -> PartialAttention:
    y, lse = _found(ring, q, k, v, tokens, dropout_rngs)
    return PartialAttention(y.astype(v.dtype), lse)


def _found(
    ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array, tokens: _Tokens, dropout_rngs: Any
) -> PartialAttention:  # y not rounded
    b, t, n, _ = q.shape
    dtype = ring.scoring.softmax_dtype
    sums = accumulation_dtype(q.dtype, dtype)
    found = PartialAttention(
        jnp.zeros((b, t, n, v.shape[-1]), sums), jnp.full((b, n, t), -jnp.inf, dtype)
    )

    def visit(state: Any, turn: jax.Array) -> Any:
        found, there = state
        mask, scoring = _meeting(ring, tokens, there[2], dropout_rngs, turn)
        scoring, given = scoring.widen(q, *there[:2])
        here = attend_blockwise(
            *given, mask, scoring, block_size=ring.block, skip_masked_tiles=True
        )
        found = merge_partials([found, here])
        return (found, _passed_on(ring, there)), None

    turns = jnp.arange(ring.parts)
    (found, _), _ = jax.lax.scan(visit, (found, (k, v, tokens)), turns)
    return found


def _meeting(
    ring: _Ring, here: _Tokens, there: _Tokens, dropout_rngs: jax.Array | None, turn: jax.Array
) -> tuple[Mask, ScoreSpec]:
    """The mask of these queries over those keys, and how they score."""
    mask = Mask(ring.pattern, positions=here.positions, segments=here.segments)
    mask = mask.with_keys(there.positions, there.segments)
    place = jax.lax.axis_index(ring.axis)
    dropout_rngs = fold_in(fold_in(dropout_rngs, place), turn)
    return mask, ring.scoring._replace(dropout_rngs=dropout_rngs)


def _passed_on(ring: _Ring, things: Any) -> Any:
    """What the device before had."""
    pairs = [(part, (part + 1) % ring.parts) for part in range(ring.parts)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, pairs), things)


def _forward(
    ring: _Ring, q: Any, k: Any, v: Any, tokens: _Tokens, dropout_rngs: Any
) -> tuple[PartialAttention, tuple[Any, ...]]:
    y, lse = _found(ring, q, k, v, tokens, dropout_rngs)
    y, rest = split_high_low(y, v.dtype)
    out = PartialAttention(y, lse)
    return out, (q, k, v, tokens, dropout_rngs, out, rest)


def _backward(ring: _Ring, kept: Any, cotangent: PartialAttention) -> Any:
    q, k, v, tokens, dropout_rngs, out, rest = kept
    dtype = accumulation_dtype(q.dtype, ring.scoring.softmax_dtype)
    shift = softmax_grad_delta(out, rest, cotangent, q.dtype.name)

    def visit(state: Any, turn: jax.Array) -> Any:
        dq, there, sums = state
        mask, scoring = _meeting(ring, tokens, there[2], dropout_rngs, turn)
        given = q, *there[:2], mask, scoring, out.lse, cotangent.y, shift
        dq_here, *here = blockwise_gradients(*given, block_size=ring.block, skip_masked_tiles=True)
        sums = [each + more for each, more in zip(sums, here, strict=True)]
        return (dq + dq_here, *_passed_on(ring, (there, sums))), None

    zeros = [jnp.zeros(x.shape, dtype) for x in (q, k, v)]
    start = zeros[0], (k, v, tokens), zeros[1:]
    (dq, _, (dk, dv)), _ = jax.lax.scan(visit, start, jnp.arange(ring.parts))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_around.defvjp(_forward, _backward)
