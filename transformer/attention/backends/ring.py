"""Ring attention: exact attention over a sequence whose tokens are sharded over devices.

Each device keeps its queries. Keys and values move from device to device until every query has met
every key; a running softmax merges the results (Liu et al. 2023, "Ring Attention with Blockwise
Transformers", section 3). A device holds at most two shards of the keys at once. The backward pass
sends keys and values around once more, together with the sums of their gradients.

Masks are computed from positions and segments, which move with the keys. So tokens may be in any
order (a causal mask wants an order that gives each device the same work), and tiles that a mask
hides are skipped.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from transformer.attention.backends.blockwise import (
    attend_blockwise,
    blockwise_gradients,
    softmax_grad_delta,
)
from transformer.attention.backends.partial import (
    PartialAttention,
    merge_partials,
    repeat_kv_for_shards,
    widen,
)
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.reference import ScoreSpec
from transformer.layers.basic import fold_in
from transformer.layers.precise_einsum import accumulation_dtype, split_high_low
from transformer.model_context import ActivationConstraint


class _Ring(NamedTuple):
    """Static settings of a ring. Hashable: `custom_vjp` keys on it."""

    axis: str  # of the mesh
    num_devices: int
    pattern: MaskPattern
    score_spec: ScoreSpec  # without dropout_rngs
    block_size: int


class _Tokens(NamedTuple):
    """Positions and segments of a shard of tokens."""

    positions: Int[Array, "#B t"]
    segments: Int[Array, "#B t"] | Bool[Array, "#B t"] | None


def attend_ring(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    mask: Mask,  # a pattern, positions, segments
    score_spec: ScoreSpec,  # dot products, perhaps with a soft cap
    constrain: ActivationConstraint,  # shards the axis `length`
    *,
    block_size: int,
) -> PartialAttention:
    """Compute `attend_reference`. Which weights are dropped depends on the number of devices."""
    mesh = constrain.mesh
    assert mesh is not None
    (axis,) = constrain.partition_spec(("length",), q.shape[1:2])
    assert isinstance(axis, str)  # a ring runs along one axis
    # With fewer key heads than devices along `heads`, each device needs a copy of the key head that
    # its query heads share.
    k = repeat_kv_for_shards(k, constrain.num_shards("heads"))
    v = repeat_kv_for_shards(v, constrain.num_shards("heads"))
    # Self-attention: at the start, the keys on a device belong to its own queries.
    tokens = _Tokens(mask.resolved_positions(q.shape[1], k.shape[1])[0], mask.segments)
    # Random keys are arrays, which static settings cannot hold: they are passed beside them.
    static_spec = score_spec._replace(dropout_rngs=None)
    ring = _Ring(axis, mesh.shape[axis], mask.pattern, static_spec, block_size)

    def layout(x: jax.Array, axes: tuple[str | None, ...]) -> Any:
        return constrain.partition_spec(axes[: x.ndim], x.shape)

    heads = ("batch", "length", "heads", None)
    rngs = score_spec.dropout_rngs
    in_specs = (
        layout(q, heads),
        layout(k, heads),
        layout(v, heads),
        jax.tree.map(lambda x: layout(x, ("batch", "length")), tokens),
        None if rngs is None else layout(rngs, ("batch",)),
    )
    b, t, n, _ = q.shape
    lse_spec = constrain.partition_spec(("batch", "heads", "length"), (b, n, t))
    out_specs: Any = PartialAttention(layout(q, heads), lse_spec)  # type: ignore[arg-type]
    # No check of varying axes: tiles that are skipped return zeros that do not vary over devices,
    # tiles that are visited return results that do, and the check wants equal types of both.
    run = jax.shard_map(
        functools.partial(_attend_shard, ring),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )
    return run(q, k, v, tokens, rngs)


# JAX's derivative of the scan would save the keys and values of every step, which is the whole
# sequence on each device. This one saves the device's own shard, and sends the rest around again.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_shard(
    ring: _Ring,
    q: Float[Array, "b t n H"],  # of this device
    k: jax.Array,
    v: jax.Array,
    tokens: _Tokens,
    dropout_rngs: Key[Array, "b"] | None,
) -> PartialAttention:
    y, lse = _forward_ring(ring, q, k, v, tokens, dropout_rngs)
    return PartialAttention(y.astype(v.dtype), lse)


def _forward_ring(
    ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array, tokens: _Tokens, dropout_rngs: Any
) -> PartialAttention:  # y not rounded
    """Attend to the keys of each device in turn, and merge."""
    b, t, n, _ = q.shape
    dtype = ring.score_spec.softmax_dtype
    sum_dtype = accumulation_dtype(q.dtype, dtype)
    # An lse of -inf is a share of 0 in the first merge.
    empty = PartialAttention(
        jnp.zeros((b, t, n, v.shape[-1]), sum_dtype), jnp.full((b, n, t), -jnp.inf, dtype)
    )

    def attend_visiting_keys(state: Any, step: jax.Array) -> Any:
        total, (k, v, key_tokens) = state
        mask, score_spec = _mask_and_spec(ring, tokens, key_tokens, dropout_rngs, step)
        # Not rounded before all devices' keys are merged: each merge would round once more.
        score_spec, (wide_q, wide_k, wide_v) = widen(score_spec, q, k, v)
        partial = attend_blockwise(
            wide_q,
            wide_k,
            wide_v,
            mask,
            score_spec,
            block_size=ring.block_size,
            skip_masked_tiles=True,  # of reordered tokens only the mask tells which are empty
        )
        total = merge_partials([total, partial])
        # The transfer does not depend on the attention of this step, so XLA can overlap the two.
        # The last one is not needed: the price of equal steps, which a scan compiles once.
        return (total, _pass_on(ring, (k, v, key_tokens))), None

    steps = jnp.arange(ring.num_devices)
    (total, _), _ = jax.lax.scan(attend_visiting_keys, (empty, (k, v, tokens)), steps)
    return total


def _mask_and_spec(
    ring: _Ring,
    query_tokens: _Tokens,
    key_tokens: _Tokens,
    dropout_rngs: jax.Array | None,
    step: jax.Array,
) -> tuple[Mask, ScoreSpec]:
    """Return the mask of this device's queries over visiting keys, and their score spec."""
    mask = Mask(ring.pattern, positions=query_tokens.positions, segments=query_tokens.segments)
    mask = mask.with_keys(key_tokens.positions, key_tokens.segments)
    # Both passes fold in the same numbers, so the backward pass drops the same weights.
    device = jax.lax.axis_index(ring.axis)
    rngs = fold_in(fold_in(dropout_rngs, device), step)
    return mask, ring.score_spec._replace(dropout_rngs=rngs)


def _pass_on(ring: _Ring, arrays: Any) -> Any:
    """Send arrays to the next device, and return those of the previous one."""
    pairs = [(device, (device + 1) % ring.num_devices) for device in range(ring.num_devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, pairs), arrays)


def _forward(
    ring: _Ring, q: Any, k: Any, v: Any, tokens: _Tokens, dropout_rngs: Any
) -> tuple[PartialAttention, tuple[Any, ...]]:
    y, lse = _forward_ring(ring, q, k, v, tokens, dropout_rngs)
    # The residuals are this device's own shards, and lse of all keys: the sums of the forward pass
    # need not be repeated to compute gradients.
    y, rounding_error = split_high_low(y, v.dtype)
    out = PartialAttention(y, lse)
    return out, (q, k, v, tokens, dropout_rngs, out, rounding_error)


def _backward(ring: _Ring, residuals: Any, cotangent: PartialAttention) -> Any:
    q, k, v, tokens, dropout_rngs, out, rounding_error = residuals
    dtype = accumulation_dtype(q.dtype, ring.score_spec.softmax_dtype)
    delta = softmax_grad_delta(out, rounding_error, cotangent, q.dtype.name)

    def add_visiting_keys(state: Any, step: jax.Array) -> Any:
        dq, (k, v, key_tokens), (dk, dv) = state
        mask, score_spec = _mask_and_spec(ring, tokens, key_tokens, dropout_rngs, step)
        # Visiting k and v; everything else is this device's own.
        dq_term, dk_term, dv_term = blockwise_gradients(
            q,
            k,
            v,
            mask,
            score_spec,
            out.lse,
            cotangent.y,
            delta,
            block_size=ring.block_size,
            skip_masked_tiles=True,
        )
        # Terms of the gradients by the lse and delta of all keys: the steps simply add up.
        kv_grads = dk + dk_term, dv + dv_term
        # The gradients travel with their keys, and are home again after the last step.
        visiting, kv_grads = _pass_on(ring, ((k, v, key_tokens), kv_grads))
        return (dq + dq_term, visiting, kv_grads), None

    # Sums over all devices in the wide dtype, rounded once at the end.
    start = (
        jnp.zeros(q.shape, dtype),
        (k, v, tokens),
        (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)),
    )
    steps = jnp.arange(ring.num_devices)
    (dq, _, (dk, dv)), _ = jax.lax.scan(add_visiting_keys, start, steps)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend_shard.defvjp(_forward, _backward)
