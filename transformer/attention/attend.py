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
from transformer.attention.backends.query_blocks import attend_query_blocks
from transformer.attention.backends.ring import attend_ring
from transformer.attention.backends.tiling import add_sinks, widen
from transformer.attention.masks import Mask, check_mask
from transformer.attention.reference import ScoreSpec, attend_reference
from transformer.hardware import Hardware
from transformer.model_context import ActivationConstraint, unconstrained
from transformer.taps import Taps
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
    outputs: frozenset[str] = frozenset(),  # `weights`, or nothing
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
        k, v = taps.visit("keys", k, aux), taps.visit("values", v, aux)
        if taps.edits_value("weights"):
            # The weights meet the values only in the reference: other backends never hold them.
            backend, edit_weights = "reference", functools.partial(taps.visit, "weights", aux={})
    length, mesh_known = q.shape[1], constrain.mesh is not None
    context_shards = constrain.num_shards("length") if mesh_known else 1
    # All of it is static: the choice is made once, while the model is traced, and then cached.
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
        dot_product_only=score_spec.is_dot_product and not score_spec.soft_cap,
        soft_capped=score_spec.is_dot_product and score_spec.soft_cap > 0,
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
    if choice.backend == "reference":
        y, weights = attend_reference(q, k, v, mask, score_spec, sink_logits, edit_weights)
        if "weights" in outputs:
            aux["weights"] = weights
    else:
        y = call_backend(
            choice.backend, q, k, v, mask, score_spec, sink_logits, hardware, constrain
        )
    return AttentionOutput(y if taps is None else taps.visit("head_outputs", y, aux), aux)


@functools.lru_cache(maxsize=64)
def _log_choice_once(choice: BackendChoice) -> None:
    if choice.is_fallback:
        log.warning("attention: %s; using %s", choice.reason, choice.backend)
    else:
        log.info("attention: using %s: %s", choice.backend, choice.reason)


def call_backend(
    backend: Backend,  # any but the reference, and one that supports the inputs
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask,
    score_spec: ScoreSpec,
    sink_logits: Float[Array, "N"] | None,
    hardware: Hardware,
    constrain: ActivationConstraint,
) -> Float[Array, "B T N Hv"]:
    """Return attention without weights, computed by the named backend."""
    # The reference checks the arrays when it expands them; kernels read them as they are.
    check_mask(mask, q.shape[1], k.shape[1])
    if backend in ("cudnn", "splash") and not hardware.is_attached:
        backend = "blockwise"
    match backend:
        case "cudnn":
            return attend_cudnn(q, k, v, mask, score_spec, constrain)
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
