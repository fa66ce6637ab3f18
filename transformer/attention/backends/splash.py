"""JAX's splash attention kernel on TPUs (Pallas): flash attention with memory linear in T.

The kernel visits only the blocks that its mask does not hide. It takes one sequence, does not scale
queries, and needs lengths and head widths that are multiples of 128. This file adds the batch, the
scale and padding with zeros, which changes no product.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float

from transformer.attention.backends.partial import repeat_kv_for_shards
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.reference import ScoreSpec
from transformer.model_context import ActivationConstraint, unconstrained

LANES = 128
"""Size of the last axis of a TPU tile."""

MAX_BLOCK_SIZE = 512


def attend_splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    mask: Mask,  # causal or full, a window, segments
    score_spec: ScoreSpec,  # dot products, perhaps with a soft cap
    *,
    constrain: ActivationConstraint = unconstrained,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Compute `attend_reference` in the kernel. `interpret` runs it on any hardware."""
    if constrain.mesh is None:
        return _attend_on_device(q, k, v, mask, score_spec, interpret)
    # XLA cannot partition a Pallas call: each device runs it on its own rows and heads.
    k = repeat_kv_for_shards(k, constrain.num_shards("heads"))
    v = repeat_kv_for_shards(v, constrain.num_shards("heads"))
    segments, pattern = mask.segments, mask.pattern

    def layout(x: jax.Array, *axes: str | None) -> Any:
        return constrain.partition_spec(axes, x.shape)

    heads = ("batch", None, "heads", None)
    q_spec, k_spec, v_spec = layout(q, *heads), layout(k, *heads), layout(v, *heads)
    segments_spec = None if segments is None else layout(segments, "batch", None)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        device_mask = Mask(pattern, segments=segments)
        return _attend_on_device(q, k, v, device_mask, score_spec, interpret)

    run_sharded = jax.shard_map(
        run,
        mesh=constrain.mesh,
        in_specs=(q_spec, k_spec, v_spec, segments_spec),
        out_specs=q_spec,
        check_vma=False,
    )
    y: jax.Array = run_sharded(q, k, v, segments)
    return y


def _attend_on_device(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    mask: Mask,
    score_spec: ScoreSpec,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    length, num_heads, head_dim = q.shape[1:]
    segments = mask.segments
    if segments is None:
        segments = jnp.ones((1, length), jnp.int32)
    q = q * score_spec.scale
    q, k, v = (_pad_to_multiple(_pad_to_multiple(x, 1), 3) for x in (q, k, v))
    # Padding gets segment 0, so it is invisible to tokens.
    padded_segments = _pad_to_multiple(segments.astype(jnp.int32), 1)
    padded_segments = jnp.broadcast_to(padded_segments, (len(q), q.shape[1]))
    kernel = _make_kernel(mask.pattern, q.shape[1], num_heads, score_spec.soft_cap, interpret)

    def attend_example(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return kernel(q, k, v, segment_ids=splash.SegmentIds(ids, ids))

    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    y = jax.vmap(attend_example)(q, k, v, padded_segments)
    y = y.swapaxes(1, 2)[:, :length, :, :head_dim]
    # In the kernel padding sees padding, so no row is empty. Our convention is a result of zero.
    return jnp.where((segments != 0)[:, :, None, None], y, 0)


def _pad_to_multiple(x: jax.Array, axis: int, multiple: int = LANES) -> jax.Array:
    missing = -x.shape[axis] % multiple
    width = [(0, 0)] * x.ndim
    width[axis] = (0, missing)
    return jnp.pad(x, width) if missing else x


def _make_kernel(
    pattern: MaskPattern, length: int, num_heads: int, soft_cap: float, interpret: bool
) -> Callable[..., jax.Array]:
    """Return the kernel for one example of `length` tokens."""
    block_size = next(size for size in (MAX_BLOCK_SIZE, 256, LANES) if length % size == 0)
    block_sizes = splash.BlockSizes(
        block_q=block_size,
        block_kv=block_size,
        block_kv_compute=block_size,
        block_q_dkv=block_size,
        block_kv_dkv=block_size,
        block_kv_dkv_compute=block_size,
        block_q_dq=block_size,
        block_kv_dq=block_size,
    )
    with jax.ensure_compile_time_eval():  # the kernel's tables of blocks become constants
        return splash.make_splash_mha(
            splash.MultiHeadMask([_make_mask(pattern, length)] * num_heads),
            block_sizes=block_sizes,
            attn_logits_soft_cap=soft_cap or None,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


@functools.cache
def _make_mask(pattern: MaskPattern, length: int) -> splash.Mask:
    """Return the kernel's mask object, which computes entries from indices when asked."""
    shape = (length, length)
    if pattern.window:
        lookback = pattern.window - 1
        return splash.LocalMask(shape, (lookback, 0 if pattern.causal else lookback), offset=0)
    return splash.CausalMask(shape) if pattern.causal else splash.FullMask(shape)
