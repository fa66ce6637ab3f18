"""Flash attention on TPUs by the splash kernel of JAX (Pallas): memory linear in T.

The kernel visits only those blocks that its mask does not hide. It takes one sequence, does not
scale queries, and wants lengths and head widths that are multiples of 128: what is missing is
padded with zeros here, which change no product.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from transformer.attention.backends.merge import repeat_kv_for_shards
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.score_spec import ScoreSpec
from transformer.context import ActivationConstraint, unconstrained

LANES = 128
"""What the last axes of a tile are multiples of on a TPU."""


MAX_BLOCK_SIZE = 512


def attend_splash(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    mask: Mask,  # causal or not, a window, segments
    score_spec: ScoreSpec,  # products, soft cap
    *,
    constrain: ActivationConstraint = unconstrained,
    interpret: bool = False,
) -> jax.Array:  # [B, T, N, H]
    """The same numbers as `attend_reference`. `interpret` runs the kernel on any hardware.

    On several devices each runs the kernel on its rows and heads: the compiler cannot cut it.
    """
    if constrain.mesh is None:
        return _attend(q, k, v, mask, score_spec, interpret)
    k, v = (repeat_kv_for_shards(each, constrain.num_shards("heads")) for each in (k, v))
    lay: Any = lambda x, *axes: constrain.partition_spec(axes, x.shape)  # noqa: E731
    segments, pattern = mask.segments, mask.pattern
    specs = [lay(each, "batch", None, "heads", None) for each in (q, k, v)]
    specs += [None if segments is None else lay(segments, "batch", None)]

    def own(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        return _attend(q, k, v, Mask(pattern, segments=segments), score_spec, interpret)

    run = jax.shard_map(
        own, mesh=constrain.mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
    )
    y: jax.Array = run(q, k, v, segments)
    return y


def _attend(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, T, K, H]
    v: jax.Array,  # [B, T, K, H]
    mask: Mask,
    scoring: ScoreSpec,
    interpret: bool,
) -> jax.Array:  # [B, T, N, H]
    """On one device."""
    length, heads, width = q.shape[1:]
    segments = mask.segments
    if segments is None:
        segments = jnp.ones((1, length), jnp.int32)
    q = q * scoring.scale
    q, k, v = (_padded(_padded(each, 1, LANES), 3, LANES) for each in (q, k, v))
    documents = _padded(segments.astype(jnp.int32), 1, LANES)
    documents = jnp.broadcast_to(documents, (len(q), q.shape[1]))
    kernel = _kernel(mask.pattern, q.shape[1], heads, scoring.soft_cap, interpret)

    def one(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return kernel(q, k, v, segment_ids=splash.SegmentIds(ids, ids))

    q, k, v = (each.swapaxes(1, 2) for each in (q, k, v))
    y = jax.vmap(one)(q, k, v, documents)
    y = y.swapaxes(1, 2)[:, :length, :, :width]
    # Padding sees padding in the kernel, so that no row is empty; here it sees nothing.
    return jnp.where((segments != 0)[:, :, None, None], y, 0)


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -x.shape[axis] % multiple
    width = [(0, 0)] * x.ndim
    width[axis] = (0, missing)
    return jnp.pad(x, width) if missing else x


def _kernel(
    pattern: MaskPattern, length: int, heads: int, soft_cap: float, interpret: bool
) -> Callable[..., jax.Array]:
    block = next(size for size in (MAX_BLOCK_SIZE, 256, LANES) if length % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    with jax.ensure_compile_time_eval():  # the kernel's own tables of blocks are constants
        return splash.make_splash_mha(
            splash.MultiHeadMask([_mask(pattern, length)] * heads),
            block_sizes=sizes,
            attn_logits_soft_cap=soft_cap or None,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


@functools.cache
def _mask(pattern: MaskPattern, length: int) -> splash.Mask:
    """As the kernel has it: computed from indices, never as an array."""
    shape = (length, length)
    if pattern.window:
        behind = pattern.window - 1
        return splash.LocalMask(shape, (behind, 0 if pattern.causal else behind), offset=0)
    return splash.CausalMask(shape) if pattern.causal else splash.FullMask(shape)
