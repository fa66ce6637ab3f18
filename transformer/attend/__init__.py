"""`attend(q, k, v, mask)`: softmax attention without weights of its own, in several forms.

All forms compute the same numbers; they differ in speed and memory. Each has its file.
"""

import functools
import logging
from typing import NamedTuple

import jax

from transformer.attend.blockwise import Looked, attend_blockwise
from transformer.attend.choose import Case, Choice, Form, choose
from transformer.attend.cudnn import attend_cudnn
from transformer.attend.merge import merge, sink
from transformer.attend.parts import for_each_part
from transformer.attend.query_blocks import attend_query_blocks
from transformer.attend.reference import attend_reference
from transformer.attend.ring import attend_ring
from transformer.attend.scoring import Bias, Meet, Scoring, products
from transformer.hardware import Hardware
from transformer.masks import Mask
from transformer.shared import Constrain, unconstrained

__all__ = [
    "Attended",
    "Bias",
    "Case",
    "Choice",
    "Form",
    "Looked",
    "Meet",
    "Scoring",
    "attend",
    "attend_blockwise",
    "choose",
    "merge",
    "products",
    "sink",
]

log = logging.getLogger(__name__)


class Attended(NamedTuple):
    """What attention has looked up."""

    y: jax.Array  # [B, T, N, H of values]
    aux: dict[str, jax.Array]  # `weights` [B, N, T, S] if requested


def attend(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    scoring: Scoring,
    *,
    sinks: jax.Array | None = None,  # [N] scores of a key without a value
    form: Form = "auto",
    hardware: Hardware,
    constrain: Constrain = unconstrained,
    outputs: frozenset[str] = frozenset(),
) -> Attended:
    """softmax(scores under the mask) v. A query that sees nothing gets zeros."""
    case = Case(
        hardware=hardware,
        pattern=mask.pattern,
        dtype=str(q.dtype),
        queries=q.shape[1],
        keys=k.shape[1],
        query_width=q.shape[-1],
        value_width=v.shape[-1],
        segments=mask.segments is not None,
        irregular=mask.irregular,
        own_keys=mask.key_positions is None and q.shape[1] == k.shape[1],
        products=scoring.plain,
        capped=scoring.capped,
        relative=scoring.relative is not None,
        sinks=sinks is not None,
        dropout=bool(scoring.rate) and scoring.dropout_rngs is not None,
        weights="weights" in outputs,
        parts=_parts(constrain, q.shape[1]),
        meshed=constrain.mesh is not None,
    )
    choice = choose(form, case)
    _tell(choice)
    match choice.form:
        case "cudnn":
            k, v = (_as_queries_lie(each, constrain) for each in (k, v))
            return Attended(attend_cudnn(q, k, v, mask.pattern, scale=scoring.scale), {})
        case "splash":
            # Pallas takes a while to import, and is for TPUs alone.
            from transformer.attend.splash import attend_splash

            return Attended(attend_splash(q, k, v, mask, scoring, constrain=constrain), {})
        case "query_blocks":
            return Attended(attend_query_blocks(q, k, v, mask, scoring, sinks), {})
        case "blockwise":
            if sinks is None:
                return Attended(attend_blockwise(q, k, v, mask, scoring, block=hardware.tile).y, {})
            scoring, given = scoring.widened(q, k, v)
            looked = attend_blockwise(*given, mask, scoring, block=hardware.tile)
            return Attended(sink(looked, sinks).y.astype(v.dtype), {})
        case "ring":
            around = attend_ring(q, k, v, mask, scoring, constrain, block=hardware.tile)
            return Attended(around.y if sinks is None else sink(around, sinks).y, {})
    y, weights = attend_reference(q, k, v, mask, scoring, sinks)
    return Attended(y, {"weights": weights} if "weights" in outputs else {})


def _parts(constrain: Constrain, length: int) -> int:
    """Into how many parts so many tokens are cut: not at all if they do not divide."""
    parts = constrain.parts("length")
    return 1 if length % parts else parts


@functools.lru_cache(maxsize=64)
def _tell(choice: Choice) -> None:
    """Each choice once in a process, though every layer makes it."""
    if choice.fell_back:
        log.warning("attention: %s; using %s", choice.why, choice.form)
    else:
        log.info("attention: using %s: %s", choice.form, choice.why)


def _as_queries_lie(
    x: jax.Array,  # [B, S, K, H]
    constrain: Constrain,
) -> jax.Array:  # [B, S, K or more, H]
    """Keys or values, their heads cut for devices as those of the queries: cuDNN's rule asks it."""
    own = for_each_part(x, constrain.parts("heads"))
    return x if own is x else constrain(own, ("batch", None, "heads", None))
