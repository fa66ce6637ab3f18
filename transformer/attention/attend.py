"""Heads of keys and values that are cut for devices.

`attend(q, k, v, mask)`: softmax attention without weights of its own, in several forms.

All forms compute the same numbers; they differ in speed and memory. Each has its file.
"""

import functools
import logging
from typing import NamedTuple

import jax

from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.choose import AttentionSpec, BackendChoice, choose_backend
from transformer.attention.backends.cudnn import attend_cudnn
from transformer.attention.backends.merge import add_sinks, repeat_kv_for_shards
from transformer.attention.backends.query_blocks import attend_query_blocks
from transformer.attention.backends.reference import attend_reference
from transformer.attention.backends.ring import attend_ring
from transformer.attention.config import Backend
from transformer.attention.masks import Mask
from transformer.attention.score_spec import ScoreSpec
from transformer.context import ActivationConstraint, unconstrained
from transformer.hardware import Hardware

log = logging.getLogger(__name__)


class AttentionOutput(NamedTuple):
    """What attention has looked up."""

    y: jax.Array  # [B, T, N, H of values]
    aux: dict[str, jax.Array]  # `weights` [B, N, T, S] if requested


def attend(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    score_spec: ScoreSpec,
    *,
    sink_logits: jax.Array | None = None,  # [N] scores of a key without a value
    backend: Backend = "auto",
    hardware: Hardware,
    constrain: ActivationConstraint = unconstrained,
    outputs: frozenset[str] = frozenset(),
) -> AttentionOutput:
    """softmax(scores under the mask) v. A query that sees nothing gets zeros."""
    case = AttentionSpec(
        hardware=hardware,
        pattern=mask.pattern,
        dtype=str(q.dtype),
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        head_dim=q.shape[-1],
        value_head_dim=v.shape[-1],
        has_segments=mask.segments is not None,
        has_extra_masks=mask.has_extra_masks,
        keys_match_queries=mask.key_positions is None and q.shape[1] == k.shape[1],
        dot_product_only=score_spec.dot_product_only,
        soft_capped=score_spec.soft_capped,
        has_relative_tables=score_spec.relative_tables is not None,
        has_sinks=sink_logits is not None,
        has_dropout=bool(score_spec.dropout_rate) and score_spec.dropout_rngs is not None,
        returns_weights="weights" in outputs,
        context_shards=_parts(constrain, q.shape[1]),
        mesh_known=constrain.mesh is not None,
    )
    choice = choose_backend(backend, case)
    _log_choice_once(choice)
    match choice.backend:
        case "cudnn":
            k, v = (_as_queries_lie(each, constrain) for each in (k, v))
            return AttentionOutput(attend_cudnn(q, k, v, mask.pattern, scale=score_spec.scale), {})
        case "splash":
            # Pallas takes a while to import, and is for TPUs alone.
            from transformer.attention.backends.splash import attend_splash

            return AttentionOutput(
                attend_splash(q, k, v, mask, score_spec, constrain=constrain), {}
            )
        case "query_blocks":
            return AttentionOutput(attend_query_blocks(q, k, v, mask, score_spec, sink_logits), {})
        case "blockwise":
            if sink_logits is None:
                return AttentionOutput(
                    attend_blockwise(q, k, v, mask, score_spec, block_size=hardware.tile_size).y, {}
                )
            score_spec, given = score_spec.widen(q, k, v)
            looked = attend_blockwise(*given, mask, score_spec, block_size=hardware.tile_size)
            return AttentionOutput(add_sinks(looked, sink_logits).y.astype(v.dtype), {})
        case "ring":
            around = attend_ring(
                q, k, v, mask, score_spec, constrain, block_size=hardware.tile_size
            )
            return AttentionOutput(
                around.y if sink_logits is None else add_sinks(around, sink_logits).y, {}
            )
    y, weights = attend_reference(q, k, v, mask, score_spec, sink_logits)
    return AttentionOutput(y, {"weights": weights} if "weights" in outputs else {})


def _parts(constrain: ActivationConstraint, length: int) -> int:
    """Into how many parts so many tokens are cut: not at all if they do not divide."""
    parts = constrain.num_shards("length")
    return 1 if length % parts else parts


@functools.lru_cache(maxsize=64)
def _log_choice_once(choice: BackendChoice) -> None:
    """Each choice once in a process, though every layer makes it."""
    if choice.is_fallback:
        log.warning("attention: %s; using %s", choice.reason, choice.backend)
    else:
        log.info("attention: using %s: %s", choice.backend, choice.reason)


def _as_queries_lie(
    x: jax.Array,  # [B, S, K, H]
    constrain: ActivationConstraint,
) -> jax.Array:  # [B, S, K or more, H]
    """Keys or values, their heads cut for devices as those of the queries: cuDNN's rule asks it."""
    own = repeat_kv_for_shards(x, constrain.num_shards("heads"))
    return x if own is x else constrain(own, ("batch", None, "heads", None))
