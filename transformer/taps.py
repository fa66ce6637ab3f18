"""Intermediate values that a caller requests or replaces, as layers see them.

`transformer.inspection` has the functions around them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import struct

Outputs = frozenset[str]
"""Names of extra outputs to return in `aux`: `weights`, `losses`, ... Static under jit."""


NO_OUTPUTS: Outputs = frozenset()


Edit = Callable[[jax.Array, int | jax.Array], jax.Array]
"""(value, number of the layer from 0) -> the value to continue with, of equal shape and dtype."""


BLOCK_VALUES = {
    "residual_pre": "[B, T, D] residual stream that enters the layer",
    "residual_mid": "[B, T, D] residual stream after the mixer and cross-attention",
    "residual_post": "[B, T, D] residual stream that leaves the layer: its hidden states",
    "mixer_output": "[B, T, D] output of the mixer, before the residual connection",
    "cross_output": "[B, T, D] output of cross-attention",
    "feed_forward_output": "[B, T, D] output of the feed-forward or mixture of experts",
}
"""Values of every layer, by name."""


ATTENTION_VALUES = {
    "queries": "[B, T, N, H] queries, after RoPE",
    "keys": "[B, S, K, H] keys, after RoPE; with a cache all that it holds",
    "values": "[B, S, K, H of values] values; with a cache all that it holds",
    "weights": "[B, N, T, S] attention weights (selects the reference backend)",
    "head_outputs": "[B, T, N, H of values] output of each head, before the output projection",
}
"""Values of attention mixers that call `attend`, by name."""


HEAD_OUTPUTS = {"head_outputs": ATTENTION_VALUES["head_outputs"]}
"""Values of mixers that compute the outputs of their heads in another way than by `attend`."""


OTHER_OUTPUTS = {
    "logits": "logits of the model's head",
    "losses": "auxiliary losses, by name",
    "weights": "attention weights, of mixers that have them",
}
"""Outputs that can be requested of every model; mixers without them return none, or refuse."""


class Taps(struct.PyTreeNode):
    """Requested values and edits, as one layer sees them."""

    layer: Any = None
    """Number of the layer; traced in a scan."""
    outputs: Outputs = struct.field(pytree_node=False, default=NO_OUTPUTS)
    edits: tuple[tuple[str, Edit], ...] = struct.field(pytree_node=False, default=())

    def visit(self, name: str, value: jax.Array, aux: dict[str, Any]) -> jax.Array:
        """Return the value, edited if there is an edit of it, and record it if it is requested.

        Raises:
          ValueError: If an edit returns another shape or dtype.
        """
        for edited, edit in self.edits:
            if edited == name:
                new: Any = edit(value, self.layer)
                if getattr(new, "shape", None) != value.shape or new.dtype != value.dtype:
                    is_array = hasattr(new, "shape")
                    found = f"{new.dtype}{list(new.shape)}" if is_array else type(new).__name__
                    raise ValueError(
                        f"edit of {name}: returns {found} for {value.dtype}{list(value.shape)}; "
                        "return the same shape and dtype"
                    )
                value = new
        if name in self.outputs:
            aux[name] = value
        return value

    def edits_value(self, name: str) -> bool:
        """Return True if there is an edit of a value."""
        return any(edited == name for edited, _ in self.edits)

    def within(self, prefix: str) -> "Taps":
        """Return the taps of a part whose names may have a prefix, and in edits must have it."""
        outputs = outputs_within(self.outputs, prefix)
        return self.replace(outputs=outputs, edits=edits_within(self.edits, prefix))


def outputs_within(outputs: Outputs, prefix: str) -> Outputs:
    """Return names of outputs, and those with a prefix also without it."""
    return outputs | {name.removeprefix(prefix) for name in outputs if name.startswith(prefix)}


def edits_within(edits: Iterable[tuple[str, Edit]], prefix: str) -> tuple[tuple[str, Edit], ...]:
    """Return the edits whose names have a prefix, without it."""
    return tuple(
        (name.removeprefix(prefix), edit) for name, edit in edits if name.startswith(prefix)
    )


def reject_requests(kind: str, taps: Taps, where: str) -> None:
    """Raise ValueError if other values than `HEAD_OUTPUTS` are requested or edited."""
    others = ATTENTION_VALUES.keys() - HEAD_OUTPUTS.keys()
    for name in sorted((taps.outputs | dict(taps.edits).keys()) & others):
        raise ValueError(f"mixer {kind}: shows no {name} {where}; leave the request out")
