"""Which form of attention is used: asked for by name, or `auto` by hardware, dtype and mask."""

import dataclasses
from typing import Literal, NamedTuple

from transformer.attend.query_blocks import SMALLEST_BLOCK
from transformer.hardware import Hardware
from transformer.masks import Pattern

Form = Literal["auto", "reference", "query_blocks", "blockwise", "cudnn"]


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
    """Whether arrays (segments, lengths, positions of a cache) narrow the mask."""
    own_keys: bool = True
    """Whether keys are those of the queries, in the same order."""
    products: bool = True
    """Whether scores are products of queries and keys alone: no bias, no MLP, no soft cap."""
    relative: bool = False
    """Whether keys and values gain vectors by their distance."""
    sinks: bool = False
    """Whether a key without a value takes part in the softmax."""
    dropout: bool = False
    weights: bool = False
    """Whether the weights themselves are wanted."""


class Choice(NamedTuple):
    """A form, and the reason for it in a few words."""

    form: Form
    why: str
    fell_back: bool = False


def choose(form: Form, case: Case) -> Choice:
    """The form that serves `case`: the one asked for if it can, else the reference, with a word."""
    if form == "auto":
        return _auto(case)
    obstacle = OBSTACLES[form](case)
    if obstacle:
        return Choice("reference", f"{form} cannot serve: {obstacle}", fell_back=True)
    return Choice(form, "asked for")


FASTEST: dict[str, Form] = {"cpu": "query_blocks", "gpu": "cudnn"}


def _auto(case: Case) -> Choice:
    best = FASTEST.get(case.hardware.platform, "reference")
    obstacle = OBSTACLES[best](case)
    if obstacle:
        return Choice("reference", f"{best} cannot serve: {obstacle}")
    return Choice(best, f"the fastest on {case.hardware.platform}")


def _query_blocks_obstacle(case: Case) -> str:
    if case.weights:
        return "attention weights are wanted"
    if not (case.pattern.causal and case.pattern.ordered and case.own_keys):
        return "it needs a causal mask over tokens in order"
    if case.pattern.prefix:
        return "a prefix is seen by earlier queries"
    if case.queries < 2 * SMALLEST_BLOCK:
        return f"{case.queries} queries are fewer than two blocks of {SMALLEST_BLOCK}"
    return ""


def _blockwise_obstacle(case: Case) -> str:
    if case.weights:
        return "attention weights are wanted"
    if case.relative:
        return "tables of relative positions act on values too"
    return ""


def _cudnn_obstacle(case: Case) -> str:
    if case.hardware.platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {case.hardware.platform}"
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
    if case.segments or case.pattern.window or case.pattern.prefix or not case.pattern.ordered:
        return "the mask is more than causal"
    if case.pattern.causal and not case.own_keys:
        return "causal attention to other keys than the queries' own"
    return ""


OBSTACLES = {
    "reference": lambda case: "",
    "query_blocks": _query_blocks_obstacle,
    "blockwise": _blockwise_obstacle,
    "cudnn": _cudnn_obstacle,
}
