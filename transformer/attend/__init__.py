"""`attend(q, k, v, mask)`: softmax attention without weights of its own, in several forms.

All forms compute the same numbers; they differ in speed and memory. Each has its file.
"""

import logging
from typing import Any, NamedTuple

import jax

from transformer.attend.choose import Case, Choice, Form, choose
from transformer.attend.cudnn import attend_cudnn
from transformer.attend.query_blocks import attend_query_blocks
from transformer.attend.reference import Bias, Meet, attend_reference, products
from transformer.hardware import Hardware
from transformer.masks import Mask
from transformer.positions.relative import RelativeTables

__all__ = ["Attended", "Bias", "Case", "Choice", "Form", "Meet", "attend", "choose", "products"]

log = logging.getLogger(__name__)


class Attended(NamedTuple):
    """What attention has looked up."""

    y: jax.Array  # [B, T, N, H of values]
    aux: dict[str, jax.Array]  # `weights` [B, N, T, S] if wanted


def attend(
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: Mask,
    *,
    form: Form = "auto",
    hardware: Hardware,
    scale: float,
    meet: Meet = products,
    bias: Bias | None = None,
    relative: RelativeTables | None = None,
    softmax_dtype: str = "float32",
    rate: float = 0.0,
    keys: jax.Array | None = None,  # [B] random keys for dropout of the weights; None: none
    want: frozenset[str] = frozenset(),
) -> Attended:
    """softmax(scale q k^T + bias under the mask) v. A query that sees nothing gets zeros.

    `meet` scores queries and keys in another way than by products, `bias` is a function of their
    positions, `relative` are tables of vectors that keys and values gain by their distance.
    """
    case = Case(
        hardware=hardware,
        pattern=mask.pattern,
        dtype=str(q.dtype),
        queries=q.shape[1],
        keys=k.shape[1],
        query_width=q.shape[-1],
        value_width=v.shape[-1],
        segments=mask.narrowed,
        own_keys=mask.key_positions is None and q.shape[1] == k.shape[1],
        products=meet is products and bias is None and relative is None,
        dropout=bool(rate) and keys is not None,
        weights="weights" in want,
    )
    choice = choose(form, case)
    if choice.fell_back:
        log.warning("attention: %s; using %s", choice.why, choice.form)
    if choice.form == "cudnn":
        return Attended(attend_cudnn(q, k, v, mask.pattern, scale=scale), {})
    arguments: dict[str, Any] = dict(
        scale=scale,
        meet=meet,
        bias=bias,
        relative=relative,
        softmax_dtype=softmax_dtype,
        rate=rate,
        keys=keys,
    )
    if choice.form == "query_blocks":
        return Attended(attend_query_blocks(q, k, v, mask, **arguments), {})
    y, weights = attend_reference(q, k, v, mask, **arguments)
    return Attended(y, {"weights": weights} if "weights" in want else {})
