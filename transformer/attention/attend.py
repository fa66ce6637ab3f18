"""`attend(q, k, v, mask, score_spec)`: softmax attention without weights, in several backends.

All backends compute the same result; they differ in speed and memory. Each is a file of
`backends/`, and `backends/choose.py` selects one.
"""

import functools
import logging
from typing import NamedTuple

import jax

from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.choose import AttentionSpec, BackendChoice, choose_backend
from transformer.attention.backends.cudnn import attend_cudnn
from transformer.attention.backends.merge import add_sinks
from transformer.attention.backends.query_blocks import attend_query_blocks
from transformer.attention.backends.reference import attend_reference
from transformer.attention.backends.ring import attend_ring
from transformer.attention.config import Backend
from transformer.attention.masks import Mask
from transformer.attention.score_spec import ScoreSpec
from transformer.context import ActivationConstraint, unconstrained
from transformer.hardware import Hardware
from transformer.shapes import check_shapes

log = logging.getLogger(__name__)


class AttentionOutput(NamedTuple):
    """Result of `attend`."""

    y: jax.Array  # [B, T, N, H of values]
    aux: dict[str, jax.Array]  # `weights` [B, N, T, S], if requested


def attend(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    score_spec: ScoreSpec,
    *,
    sink_logits: jax.Array | None = None,  # [N]
    backend: Backend = "auto",
    hardware: Hardware,
    constrain: ActivationConstraint = unconstrained,
    outputs: frozenset[str] = frozenset(),
) -> AttentionOutput:
    """Return softmax(scores under the mask) v. A query without a visible key gets zeros.

    Args:
      q: Queries.
      k: Keys. K divides N; each key head serves N / K query heads.
      v: Values.
      mask: Visible keys of each query.
      score_spec: Scores and dropout.
      sink_logits: Scores of one more key per head, whose value is zero.
      backend: Implementation. One that does not support the inputs is replaced by the reference,
        with a warning.
      hardware: Decides what `auto` means.
      constrain: Layout of activations on several devices.
      outputs: Extra outputs: `weights`, or nothing.

    Raises:
      ValueError: If shapes or dtypes disagree.
    """
    check_shapes(
        q=(q, "B T N H", float),
        k=(k, "B S K H", float),
        v=(v, "B S K Hv", float),
        sink_logits=(sink_logits, "N", float),
        **mask.shape_specs,
    )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q of {q.shape[2]} heads: is no multiple of the {k.shape[2]} heads of k and v; give "
            "N = G K query heads"
        )
    length, mesh_known = q.shape[1], constrain.mesh is not None
    context_shards = constrain.num_shards("length") if mesh_known else 1
    spec = AttentionSpec(
        hardware=hardware,
        pattern=mask.pattern,
        dtype=str(q.dtype),
        num_queries=length,
        num_keys=k.shape[1],
        head_dim=q.shape[-1],
        value_head_dim=v.shape[-1],
        has_segments=mask.segments is not None,
        has_extra_masks=mask.has_extra_masks,
        keys_match_queries=mask.key_positions is None and length == k.shape[1],
        dot_product_only=score_spec.dot_product_only,
        soft_capped=score_spec.soft_capped,
        has_relative_tables=score_spec.relative_tables is not None,
        has_sinks=sink_logits is not None,
        has_dropout=bool(score_spec.dropout_rate) and score_spec.dropout_rngs is not None,
        returns_weights="weights" in outputs,
        # A length that the devices do not divide stays whole on each.
        context_shards=1 if length % context_shards else context_shards,
        mesh_known=mesh_known,
    )
    choice = choose_backend(backend, spec)
    _log_choice_once(choice)
    match choice.backend:
        case "cudnn":
            y = attend_cudnn(q, k, v, mask.pattern, score_spec.scale, constrain)
        case "splash":
            # Pallas takes a second to import, and only TPUs need it.
            from transformer.attention.backends.splash import attend_splash

            y = attend_splash(q, k, v, mask, score_spec, constrain=constrain)
        case "query_blocks":
            y = attend_query_blocks(q, k, v, mask, score_spec, sink_logits)
        case "blockwise":
            block_size = hardware.tile_size
            if sink_logits is None:
                y = attend_blockwise(q, k, v, mask, score_spec, block_size=block_size).y
            else:  # sinks are added to a result that is not rounded yet
                score_spec, wide = score_spec.widen(q, k, v)
                partial = attend_blockwise(*wide, mask, score_spec, block_size=block_size)
                y = add_sinks(partial, sink_logits).y.astype(v.dtype)
        case "ring":
            block_size = hardware.tile_size
            partial = attend_ring(q, k, v, mask, score_spec, constrain, block_size=block_size)
            y = (partial if sink_logits is None else add_sinks(partial, sink_logits)).y
        case _:
            y, weights = attend_reference(q, k, v, mask, score_spec, sink_logits)
            return AttentionOutput(y, {"weights": weights} if "weights" in outputs else {})
    return AttentionOutput(y, {})


@functools.lru_cache(maxsize=64)
def _log_choice_once(choice: BackendChoice) -> None:
    """Log a choice of backend, once in a process though every layer makes it."""
    if choice.is_fallback:
        log.warning("attention: %s; using %s", choice.reason, choice.backend)
    else:
        log.info("attention: using %s: %s", choice.backend, choice.reason)
