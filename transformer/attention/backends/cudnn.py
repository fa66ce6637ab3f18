"""Attention by cuDNN's flash kernel on NVIDIA GPUs, in 16 bits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer.attention.backends.partial import repeat_kv_for_shards
from transformer.attention.masks import Mask, MaskPattern, dense_mask
from transformer.attention.reference import ScoreSpec
from transformer.model_context import ActivationConstraint, unconstrained


def reads_pattern(
    pattern: MaskPattern,
    keys_match_queries: bool,
) -> bool:
    """Return True if the kernel computes the pattern from indices, without an array.

    It knows causal masks, with or without a sliding window.
    """
    if pattern.prefix:
        return False
    if not pattern.causal:
        return not pattern.window
    return pattern.ordered and keys_match_queries and pattern.dilation == 1


def needs_dense_mask(
    pattern: MaskPattern,
    keys_match_queries: bool,
    has_arrays: bool,  # segments, lengths or others change the mask
) -> bool:
    """Return True if the kernel needs the mask as an array."""
    return has_arrays or not reads_pattern(pattern, keys_match_queries)


def attend_cudnn(
    q: Float[Array, "B T N H"],  # bfloat16 or float16
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    score_spec: ScoreSpec,  # dot products without cap or dropout
    constrain: ActivationConstraint = unconstrained,
) -> Float[Array, "B T N H"]:
    """Return softmax(scale q k^T under the mask) v by cuDNN's flash attention (Dao et al. 2022).

    The softmax is computed in float32 inside the kernel. Memory is linear in T for causal masks,
    with or without a sliding window, and for no mask at all. Any other mask, such as that of packed
    documents, is an array of B T S numbers of 16 bits, one for all heads and layers; JAX from 0.10
    on writes a second one in the backward pass.

    A query without a visible key gets zeros and no gradient. `choose.py` lists what the kernel
    needs.
    """
    num_queries, num_keys = q.shape[1], k.shape[1]
    pattern = mask.pattern
    k, v = _shard_like_queries(k, constrain), _shard_like_queries(v, constrain)
    matched = mask.keys_match_queries(num_queries, num_keys)
    has_arrays = mask.segments is not None or mask.has_extra_masks
    visible = None
    if needs_dense_mask(pattern, matched, has_arrays):
        visible = dense_mask(mask, num_queries, num_keys)[:, None]  # [B or 1, 1, T, S]
        if visible.shape[0] > 1:
            visible = constrain(visible, ("batch", None, None, None))
    # Beside an array they still tell the kernel which blocks it may skip. Global tokens lift the
    # window.
    by_index = reads_pattern(pattern, matched) and mask.global_positions is None
    y = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=visible,
        scale=score_spec.scale,
        is_causal=by_index and pattern.causal,
        local_window_size=(pattern.window - 1, 0) if by_index and pattern.window else None,
        implementation="cudnn",
    )
    if visible is None or not mask.may_have_empty_rows(num_queries, num_keys):
        return y
    # Where no key is visible, the kernel averages hidden values.
    return jnp.where(visible.any(-1).swapaxes(1, 2)[..., None], y, 0)


def _shard_like_queries(
    x: Float[Array, "B S K H"],
    constrain: ActivationConstraint,
) -> Float[Array, "B S kv_heads H"]:
    """Split key or value heads over the devices of the query heads.

    The kernel's partitioning rule requires the same split of queries, keys and values.
    """
    repeated = repeat_kv_for_shards(x, constrain.num_shards("heads"))
    return x if repeated is x else constrain(repeated, ("batch", None, "heads", None))
