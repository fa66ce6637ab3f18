"""Which form of attention is used: asked for by name, or `auto` by hardware, dtype and mask."""

import dataclasses
from typing import NamedTuple

from transformer.attend.query_blocks import SMALLEST_BLOCK
from transformer.attention_config import Form as Form
from transformer.hardware import Hardware
from transformer.masks import Pattern


@dataclasses.dataclass(frozen=True)
class Case:
    """What a choice depends on; all of it known when the program is compiled."""

    hardware: Hardware
    pattern: Pattern
    dtype: str
    queries: int  # T
    keys: int  # S
    query_width: int  # H
    value_width: int
    segments: bool = False
    """Whether documents are packed, or padding is marked by segments."""
    irregular: bool = False
    """Whether other arrays (lengths, prefixes, globals, pairs) change the mask."""
    own_keys: bool = True
    """Whether keys are those of the queries, in the same order."""
    products: bool = True
    """Whether scores are products of queries and keys alone: no bias, no MLP, no soft cap."""
    capped: bool = False
    """Whether a soft cap is all that is done to products."""
    relative: bool = False
    """Whether keys and values gain vectors by their distance."""
    sinks: bool = False
    """Whether a key without a value takes part in the softmax."""
    dropout: bool = False
    weights: bool = False
    """Whether the weights themselves are requested."""
    parts: int = 1
    """Devices that the tokens of a sequence are spread over."""
    meshed: bool = False
    """Whether it is known how arrays lie on several devices."""


class Choice(NamedTuple):
    """A form, and the reason for it in a few words."""

    form: Form
    why: str
    fell_back: bool = False


def choose(form: Form, case: Case) -> Choice:
    """The form that serves `case`: the one asked for if it can, else the reference, with a word.

    Raises ValueError where tokens are spread over devices, and what is asked of their attention
    cannot be had without gathering them.
    """
    if case.parts > 1 and case.own_keys:
        obstacle = _ring_obstacle(case)
        if obstacle or form not in ("auto", "ring"):
            obstacle = obstacle or "keys and values have to go around"
            raise ValueError(
                f"attention.form {form}: cannot serve tokens that are spread over {case.parts} "
                f"devices: {obstacle}; set mesh.context to 1, or the form to auto"
            )
        return Choice("ring", f"tokens are spread over {case.parts} devices")
    if form == "auto":
        return _auto(case)
    obstacle = _obstacle(form, case)
    if obstacle:
        return Choice("reference", f"{form} cannot serve: {obstacle}", fell_back=True)
    return Choice(form, "asked for")


FASTEST: dict[str, tuple[Form, ...]] = {
    "cpu": ("query_blocks", "reference"),
    "gpu": ("cudnn", "reference"),
    "tpu": ("splash", "reference"),
}
"""What `auto` tries in turn; see `_auto` for `blockwise`."""


def _auto(case: Case) -> Choice:
    """The platform's own form, or else the reference; tiles where there are many scores.

    On a CPU tiles come first then, elsewhere after the kernel.
    """
    kernel, *rest = FASTEST[case.hardware.platform]
    order: list[Form] = [kernel, *rest]
    if _has_many_scores(case):
        order.insert(0 if case.hardware.platform == "cpu" else 1, "blockwise")
    first = ""
    for form in order:
        obstacle = _obstacle(form, case)
        if not obstacle:
            return Choice(form, first or f"the fastest on {case.hardware.platform}")
        first = first or f"{form} cannot serve: {obstacle}"
    raise AssertionError("the reference serves every case")


def _obstacle(form: Form, case: Case) -> str:
    """Return why a form cannot serve the case; empty if it can."""
    broken = dict(case.hardware.broken_kernels)
    if form in broken:
        return f"its kernel cannot be compiled here ({broken[form]})"
    return OBSTACLES[form](case)


def _has_many_scores(case: Case) -> bool:
    """Whether rows are long, or a window leaves most of them out."""
    reach = case.pattern.window * case.pattern.dilation
    narrow = 0 < 2 * reach <= case.keys and case.own_keys and case.queries >= 2 * case.hardware.tile
    return min(case.queries, case.keys) >= case.hardware.long or narrow


def _query_blocks_obstacle(case: Case) -> str:
    if case.weights:
        return "attention weights are requested"
    if not (case.pattern.causal and case.pattern.ordered and case.own_keys):
        return "it needs a causal mask over tokens in order"
    if case.pattern.prefix:
        return "a prefix is seen by earlier queries"
    if case.queries < 2 * SMALLEST_BLOCK:
        return f"{case.queries} queries are fewer than two blocks of {SMALLEST_BLOCK}"
    return ""


def _blockwise_obstacle(case: Case) -> str:
    if case.weights:
        return "attention weights are requested"
    if case.relative:
        return "tables of relative positions act on values too"
    return ""


def _cudnn_obstacle(case: Case) -> str:
    if case.hardware.platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {case.hardware.platform}"
    capability = case.hardware.compute_capability
    if capability.startswith("gfx"):
        return f"it runs on NVIDIA GPUs, not on AMD's {capability}"
    if capability and float(capability) < 8:
        return f"it needs compute capability 8.0 (Ampere) or more, and this GPU has {capability}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"it computes in 16 bits, not in {case.dtype}"
    if case.query_width != case.value_width:
        return "queries and values have different widths"
    if case.query_width % 8 or case.query_width > 128:
        return f"the head width {case.query_width} is no multiple of 8 up to 128"
    if not case.products:
        return "its scores are products alone, without a bias or a cap"
    if case.sinks:
        return "it has no sinks"
    if case.weights or case.dropout:
        return "it neither returns attention weights nor drops them"
    pattern = case.pattern
    if case.segments or case.irregular or pattern.window or pattern.prefix or not pattern.ordered:
        return "the mask is more than causal"
    if case.pattern.causal and not case.own_keys:
        return "causal attention to other keys than the queries' own"
    return ""


def _splash_obstacle(case: Case) -> str:
    if case.hardware.platform != "tpu":
        return f"it runs on TPUs, not on {case.hardware.platform}"
    if case.hardware.count > 1 and not case.meshed:
        return "its kernel is for one chip, and how several share the work is not known"
    if case.query_width != case.value_width:
        return "queries and values have different widths"
    if case.relative or not (case.products or case.capped):
        return "its scores are products alone, without a bias"
    if case.weights or case.dropout:
        return "it neither returns attention weights nor drops them"
    if case.sinks:
        return "it has no sinks"
    if case.irregular or case.pattern.prefix or case.pattern.dilation > 1:
        return "the mask is more than causal, a window and segments"
    if not (case.own_keys and case.pattern.ordered):
        return "it needs the queries' own keys in order"
    return ""


def _ring_obstacle(case: Case) -> str:
    if case.parts == 1:
        return "tokens are not spread over devices"
    if case.relative or not (case.products or case.capped):
        return "its scores are products alone, without a bias"
    if case.weights:
        return "it does not return attention weights"
    if case.irregular or case.pattern.prefix:
        return "the mask is more than causal, a window and segments"
    if not case.own_keys:
        return "it needs the queries' own keys"
    return ""


OBSTACLES = {
    "reference": lambda case: "",
    "query_blocks": _query_blocks_obstacle,
    "blockwise": _blockwise_obstacle,
    "cudnn": _cudnn_obstacle,
    "splash": _splash_obstacle,
    "ring": _ring_obstacle,
}
