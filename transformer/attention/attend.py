"""Softmax attention without weights: `attend` picks a backend and calls it.

    attend(q, k, v) = softmax(scores(q, k) under the mask) v

`attend_reference` is the formula; `backends/choose.py` picks a backend with the same results.
"""

import functools
import logging
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.choose import (
    AttentionSpec,
    Backend,
    BackendChoice,
    choose_backend,
)
from transformer.attention.backends.cudnn import attend_cudnn
from transformer.attention.backends.partial import add_sinks, widen
from transformer.attention.backends.query_blocks import attend_query_blocks
from transformer.attention.backends.ring import attend_ring
from transformer.attention.masks import Mask, check_mask
from transformer.attention.reference import ScoreSpec, attend_reference
from transformer.hardware import Hardware
from transformer.model_context import ActivationConstraint, unconstrained
from transformer.taps import NO_OUTPUTS, Outputs, Taps
from transformer.validation import check_shapes

log = logging.getLogger(__name__)


class AttentionOutput(NamedTuple):
    """Result of `attend`."""

    y: Float[Array, "B T N Hv"]
    aux: dict[str, jax.Array]  # `weights` [B, N, T, S], if requested


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask,
    score_spec: ScoreSpec,
    *,
    sink_logits: Float[Array, "N"] | None = None,  # scores of one more key, whose value is zero
    backend: Backend = "auto",
    hardware: Hardware,  # decides what `auto` means
    constrain: ActivationConstraint = unconstrained,  # layout on several devices
    outputs: Outputs = NO_OUTPUTS,  # `weights`, or nothing
    taps: Taps | None = None,
) -> AttentionOutput:
    """Return softmax(scores under the mask) v. A query without a visible key gets zeros.

    K divides N: each key head serves N / K query heads. A backend that does not support the inputs
    is replaced by the reference, with a warning. ValueError: shapes or dtypes disagree.
    """
    check_shapes(
        q=(q, "B T N H", float),
        k=(k, "B S K H", float),
        v=(v, "B S K Hv", float),
        sink_logits=(sink_logits, "N | None", float),
    )
    aux: dict[str, jax.Array] = {}
    edit_weights = None
    if taps is not None:
        q = taps.visit("queries", q, aux)
        k = taps.visit("keys", k, aux)
        v = taps.visit("values", v, aux)
        if taps.edits_value("weights"):
            # The weights meet the values only in the reference: other backends never hold them.
            backend, edit_weights = "reference", functools.partial(taps.visit, "weights", aux={})
    num_queries, num_keys = q.shape[1], k.shape[1]
    check_mask(mask, num_queries, num_keys)
    mesh_known = constrain.mesh is not None
    context_shards = constrain.num_shards("length") if mesh_known else 1
    # All of it is static: the choice is made once, while the model is traced, and then cached.
    spec = AttentionSpec(
        hardware=hardware,
        pattern=mask.pattern,
        dtype=str(q.dtype),
        num_queries=num_queries,
        num_keys=num_keys,
        head_dim=q.shape[-1],
        value_head_dim=v.shape[-1],
        has_segments=mask.segments is not None,
        has_extra_masks=mask.has_extra_masks,
        keys_match_queries=mask.keys_match_queries(num_queries, num_keys),
        is_dot_product=score_spec.is_dot_product,
        has_soft_cap=score_spec.soft_cap > 0,
        has_relative_tables=score_spec.relative_tables is not None,
        has_sinks=sink_logits is not None,
        has_dropout=bool(score_spec.dropout_rate) and score_spec.dropout_rngs is not None,
        returns_weights="weights" in outputs,
        # A length that the devices do not divide stays whole on each.
        context_shards=1 if num_queries % context_shards else context_shards,
        mesh_known=mesh_known,
    )
    choice = choose_backend(backend, spec)
    if choice.backend in ("cudnn", "splash") and not hardware.is_attached:
        reason = f"{choice.backend} can be traced only on its own hardware"
        choice = BackendChoice("blockwise", reason)
    _log_choice_once(choice)
    match choice.backend:
        case "cudnn":
            y = attend_cudnn(q, k, v, mask, score_spec, constrain)
        case "splash":
            # Pallas takes a second to import, and only TPUs need it.
            from transformer.attention.backends.splash import attend_splash

            y = attend_splash(q, k, v, mask, score_spec, constrain=constrain)
        case "query_blocks":
            y = attend_query_blocks(q, k, v, mask, score_spec, sink_logits)
        case "blockwise" if sink_logits is not None:
            # Sinks are added to a result that is not rounded yet.
            wide_spec, (wide_q, wide_k, wide_v) = widen(score_spec, q, k, v)
            partial = attend_blockwise(
                wide_q, wide_k, wide_v, mask, wide_spec, block_size=hardware.tile_size
            )
            y = add_sinks(partial, sink_logits).y.astype(v.dtype)
        case "blockwise":
            y = attend_blockwise(q, k, v, mask, score_spec, block_size=hardware.tile_size).y
        case "ring":
            partial = attend_ring(
                q, k, v, mask, score_spec, constrain, block_size=hardware.tile_size
            )
            y = (partial if sink_logits is None else add_sinks(partial, sink_logits)).y
        case _:
            y, weights = attend_reference(q, k, v, mask, score_spec, sink_logits, edit_weights)
            if "weights" in outputs:
                aux["weights"] = weights
    return AttentionOutput(y if taps is None else taps.visit("head_outputs", y, aux), aux)


@functools.lru_cache(maxsize=64)
def _log_choice_once(choice: BackendChoice) -> None:
    if choice.is_fallback:
        log.warning("attention: %s; using %s", choice.reason, choice.backend)
    else:
        log.info("attention: using %s: %s", choice.backend, choice.reason)
