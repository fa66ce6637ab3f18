"""Which form of attention is used: asked for by name, or `auto` by hardware, dtype and mask."""

import dataclasses
from typing import NamedTuple

from transformer.attention.backends.query_blocks import MIN_BLOCK_SIZE
from transformer.attention.config import Backend
from transformer.attention.masks import MaskPattern
from transformer.hardware import Hardware


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What a choice depends on; all of it known when the program is compiled."""

    hardware: Hardware
    pattern: MaskPattern
    dtype: str
    num_queries: int  # T
    num_keys: int  # S
    head_dim: int  # H
    value_head_dim: int
    has_segments: bool = False
    """Whether documents are packed, or padding is marked by segments."""
    has_extra_masks: bool = False
    """Whether other arrays (lengths, prefixes, globals, pairs) change the mask."""
    keys_match_queries: bool = True
    """Whether keys are those of the queries, in the same order."""
    dot_product_only: bool = True
    """Whether scores are products of queries and keys alone: no bias, no MLP, no soft cap."""
    soft_capped: bool = False
    """Whether a soft cap is all that is done to products."""
    has_relative_tables: bool = False
    """Whether keys and values gain vectors by their distance."""
    has_sinks: bool = False
    """Whether a key without a value takes part in the softmax."""
    has_dropout: bool = False
    returns_weights: bool = False
    """Whether the weights themselves are requested."""
    context_shards: int = 1
    """Devices that the tokens of a sequence are spread over."""
    mesh_known: bool = False
    """Whether it is known how arrays lie on several devices."""


class BackendChoice(NamedTuple):
    """A form, and the reason for it in a few words."""

    backend: Backend
    reason: str
    is_fallback: bool = False


def choose_backend(backend: Backend, spec: AttentionSpec) -> BackendChoice:
    """The form that serves `spec`: the one asked for if it can, else the reference, with a word.

    Raises ValueError where tokens are spread over devices, and what is asked of their attention
    cannot be had without gathering them.
    """
    if spec.context_shards > 1 and spec.keys_match_queries:
        obstacle = _ring_obstacle(spec)
        if obstacle or backend not in ("auto", "ring"):
            obstacle = obstacle or "keys and values have to go around"
            raise ValueError(
                f"attention.backend {backend}: cannot serve tokens that are spread over "
                f"{spec.context_shards} devices: {obstacle}; "
                "set mesh.context to 1, or the backend to auto"
            )
        return BackendChoice("ring", f"tokens are spread over {spec.context_shards} devices")
    if backend == "auto":
        return _auto(spec)
    obstacle = _obstacle(backend, spec)
    if obstacle:
        return BackendChoice("reference", f"{backend} cannot serve: {obstacle}", is_fallback=True)
    return BackendChoice(backend, "asked for")


PREFERRED_BACKENDS: dict[str, tuple[Backend, ...]] = {
    "cpu": ("query_blocks", "reference"),
    "gpu": ("cudnn", "reference"),
    "tpu": ("splash", "reference"),
}
"""What `auto` tries in turn; see `_auto` for `blockwise`."""


def _auto(case: AttentionSpec) -> BackendChoice:
    """The platform's own form, or else the reference; tiles where there are many scores.

    On a CPU tiles come first then, elsewhere after the kernel.
    """
    kernel, *rest = PREFERRED_BACKENDS[case.hardware.platform]
    order: list[Backend] = [kernel, *rest]
    if _has_many_scores(case):
        order.insert(0 if case.hardware.platform == "cpu" else 1, "blockwise")
    first = ""
    for form in order:
        obstacle = _obstacle(form, case)
        if not obstacle:
            return BackendChoice(form, first or f"the fastest on {case.hardware.platform}")
        first = first or f"{form} cannot serve: {obstacle}"
    raise AssertionError("the reference serves every case")


def _obstacle(form: Backend, case: AttentionSpec) -> str:
    """Return why a form cannot serve the case; empty if it can."""
    broken = dict(case.hardware.broken_kernels)
    if form in broken:
        return f"its kernel cannot be compiled here ({broken[form]})"
    return UNSUPPORTED_REASONS[form](case)


def _has_many_scores(case: AttentionSpec) -> bool:
    """Whether rows are long, or a window leaves most of them out."""
    reach = case.pattern.window * case.pattern.dilation
    narrow = (
        0 < 2 * reach <= case.num_keys
        and case.keys_match_queries
        and case.num_queries >= 2 * case.hardware.tile_size
    )
    return min(case.num_queries, case.num_keys) >= case.hardware.blockwise_min_length or narrow


def _query_blocks_obstacle(case: AttentionSpec) -> str:
    if case.returns_weights:
        return "attention weights are requested"
    if not (case.pattern.causal and case.pattern.ordered and case.keys_match_queries):
        return "it needs a causal mask over tokens in order"
    if case.pattern.prefix:
        return "a prefix is seen by earlier queries"
    if case.num_queries < 2 * MIN_BLOCK_SIZE:
        return f"{case.num_queries} queries are fewer than two blocks of {MIN_BLOCK_SIZE}"
    return ""


def _blockwise_obstacle(case: AttentionSpec) -> str:
    if case.returns_weights:
        return "attention weights are requested"
    if case.has_relative_tables:
        return "tables of relative positions act on values too"
    return ""


def _cudnn_obstacle(case: AttentionSpec) -> str:
    if case.hardware.platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {case.hardware.platform}"
    capability = case.hardware.compute_capability
    if capability.startswith("gfx"):
        return f"it runs on NVIDIA GPUs, not on AMD's {capability}"
    if capability and float(capability) < 8:
        return f"it needs compute capability 8.0 (Ampere) or more, and this GPU has {capability}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"it computes in 16 bits, not in {case.dtype}"
    if case.head_dim != case.value_head_dim:
        return "queries and values have different widths"
    if case.head_dim % 8 or case.head_dim > 128:
        return f"the head width {case.head_dim} is no multiple of 8 up to 128"
    if not case.dot_product_only:
        return "its scores are products alone, without a bias or a cap"
    if case.has_sinks:
        return "it has no sinks"
    if case.returns_weights or case.has_dropout:
        return "it neither returns attention weights nor drops them"
    pattern = case.pattern
    if (
        case.has_segments
        or case.has_extra_masks
        or pattern.window
        or pattern.prefix
        or not pattern.ordered
    ):
        return "the mask is more than causal"
    if case.pattern.causal and not case.keys_match_queries:
        return "causal attention to other keys than the queries' own"
    return ""


def _splash_obstacle(case: AttentionSpec) -> str:
    if case.hardware.platform != "tpu":
        return f"it runs on TPUs, not on {case.hardware.platform}"
    if case.hardware.count > 1 and not case.mesh_known:
        return "its kernel is for one chip, and how several share the work is not known"
    if case.head_dim != case.value_head_dim:
        return "queries and values have different widths"
    if case.has_relative_tables or not (case.dot_product_only or case.soft_capped):
        return "its scores are products alone, without a bias"
    if case.returns_weights or case.has_dropout:
        return "it neither returns attention weights nor drops them"
    if case.has_sinks:
        return "it has no sinks"
    if case.has_extra_masks or case.pattern.prefix or case.pattern.dilation > 1:
        return "the mask is more than causal, a window and segments"
    if not (case.keys_match_queries and case.pattern.ordered):
        return "it needs the queries' own keys in order"
    return ""


def _ring_obstacle(case: AttentionSpec) -> str:
    if case.context_shards == 1:
        return "tokens are not spread over devices"
    if case.has_relative_tables or not (case.dot_product_only or case.soft_capped):
        return "its scores are products alone, without a bias"
    if case.returns_weights:
        return "it does not return attention weights"
    if case.has_extra_masks or case.pattern.prefix:
        return "the mask is more than causal, a window and segments"
    if not case.keys_match_queries:
        return "it needs the queries' own keys"
    return ""


UNSUPPORTED_REASONS = {
    "reference": lambda case: "",
    "query_blocks": _query_blocks_obstacle,
    "blockwise": _blockwise_obstacle,
    "cudnn": _cudnn_obstacle,
    "splash": _splash_obstacle,
    "ring": _ring_obstacle,
}
