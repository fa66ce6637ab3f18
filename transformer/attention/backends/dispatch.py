"""Call a backend of attention by name, with the arguments that it takes."""

import jax

from transformer.attention.attend import ScoreSpec
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.cudnn import attend_cudnn
from transformer.attention.backends.merge import widen
from transformer.attention.backends.query_blocks import attend_query_blocks
from transformer.attention.backends.ring import attend_ring
from transformer.attention.config import Backend
from transformer.attention.mask_checks import check_mask
from transformer.attention.masks import Mask
from transformer.attention.sinks import add_sinks
from transformer.context import ActivationConstraint
from transformer.hardware import Hardware


def attend_fast(
    backend: Backend,  # any but the reference, and one that supports the inputs
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    score_spec: ScoreSpec,
    sink_logits: jax.Array | None,  # [N]
    hardware: Hardware,
    constrain: ActivationConstraint,
) -> jax.Array:  # [B, T, N, H of values]
    """Return attention without weights, computed by the named backend."""
    check_mask(mask, q.shape[1], k.shape[1])
    match backend:
        case "cudnn":
            return attend_cudnn(q, k, v, mask.pattern, score_spec.scale, constrain)
        case "splash":
            # Pallas takes a second to import, and only TPUs need it.
            from transformer.attention.backends.splash import attend_splash

            return attend_splash(q, k, v, mask, score_spec, constrain=constrain)
        case "query_blocks":
            return attend_query_blocks(q, k, v, mask, score_spec, sink_logits)
        case "blockwise":
            if sink_logits is None:
                return attend_blockwise(q, k, v, mask, score_spec, block_size=hardware.tile_size).y
            # Sinks are added to a result that is not rounded yet.
            score_spec, wide = widen(score_spec, q, k, v)
            partial = attend_blockwise(*wide, mask, score_spec, block_size=hardware.tile_size)
            return add_sinks(partial, sink_logits).y.astype(v.dtype)
        case "ring":
            partial = attend_ring(
                q, k, v, mask, score_spec, constrain, block_size=hardware.tile_size
            )
            return (partial if sink_logits is None else add_sinks(partial, sink_logits)).y
    raise AssertionError(f"backend {backend}")
