"""Recurrent cells and the scan over time that all recurrent mixers share.

The state is reset at the first token of each document and is unchanged by padding. Decoding resumes
from a cached state: there position 0 starts a document, and padding has position -1.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.masks import Mask
from transformer.attention.token_segments import previous_segments, token_segments
from transformer.config import Initialization, Initializer
from transformer.context import ModelContext
from transformer.layers.basic import apply_linear, declare_weight

RecurrentCell = Callable[[Any, Any], tuple[Any, Any]]
"""(state [B, ...], inputs of one token [B, ...]) -> (state, output [B, ...])."""


class DocumentBoundaries(NamedTuple):
    """Tokens at which the state is reset, and tokens at which it is updated."""

    is_start: jax.Array  # [B or 1, T] whether a document begins here
    is_token: jax.Array  # [B or 1, T] whether there is a token, and no padding


def document_boundaries(
    mask: Mask,
    positions: jax.Array,  # [B or 1, T]
    *,
    cached: bool = False,
    backward: bool = False,
) -> DocumentBoundaries | None:
    """Return boundaries from segments, lengths and positions; None: one document, no padding.

    With `backward`, for rows read from their end.
    """
    segments = token_segments(mask, positions.shape[1])
    if backward and segments is not None:
        segments = jnp.flip(segments, axis=1)
    if cached:
        real = positions >= 0 if segments is None else (positions >= 0) & (segments != 0)
        return DocumentBoundaries((positions == 0) & real, real)
    if segments is None:
        return None
    return DocumentBoundaries(
        (segments != 0) & (segments != previous_segments(segments)), segments != 0
    )


def scan_cell(
    cell: RecurrentCell,
    state: Any,  # [B, ...] before the first token
    inputs: Any,  # [B, T, ...]
    boundaries: DocumentBoundaries | None,
    initial_states: Any = None,  # [B, T, ...] what a state is when a document begins; None: zeros.
    # Without a timeline no document begins, and they are not looked at
) -> tuple[Any, Any]:  # the state after the last token, the outputs [B, T, ...]
    """Run a cell over the tokens of each row. Outputs at padding are zero."""

    def step(state: Any, now: tuple[Any, DocumentBoundaries | None, Any]) -> tuple[Any, Any]:
        x, at, seed = now
        if at is None:
            return cell(state, x)
        seed = jax.tree.map(jnp.zeros_like, state) if seed is None else seed
        before = _choose(at.is_start, seed, state)
        after, y = cell(before, x)
        return _choose(at.is_token, after, before), y

    initial_states = None if boundaries is None else initial_states
    state, y = jax.lax.scan(step, state, _swapped((inputs, boundaries, initial_states)))
    y = _swapped(y)
    if boundaries is not None:
        y = jax.tree.map(lambda leaf: jnp.where(_spread(boundaries.is_token, leaf), leaf, 0), y)
    return state, y


def _choose(flags: jax.Array, chosen: Any, otherwise: Any) -> Any:
    """Select one state where the flags [B or 1] are set, the other elsewhere."""
    pick = lambda a, b: jnp.where(_spread(flags, b), a, b)  # noqa: E731
    return jax.tree.map(pick, chosen, otherwise)


def _spread(flags: jax.Array, like: jax.Array) -> jax.Array:
    """Append axes of size 1 to the flags, up to the rank of `like`."""
    return flags.reshape(flags.shape + (1,) * (like.ndim - flags.ndim))


def _swapped(tree: Any) -> Any:
    """Swap the first two axes: [B, T, ...] <-> [T, B, ...]."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


RECURRENT_INIT = Initialization(std=0.0, depth_scaled=False)
"""Initialization of matrices inside the scan, whatever the model uses elsewhere.

They are applied T times in a row: much smaller matrices forget, much larger ones saturate.
"""


LSTM_GATES = ("input", "forget", "candidate", "output")
"""Order of the gates in the weights; the same as PyTorch's."""


class LSTMState(struct.PyTreeNode):
    """State of an LSTM, which is also its cache."""

    hidden: jax.Array  # [B, H]
    cell: jax.Array  # [B, H] float32: a sum over all time must not lose digits

    @staticmethod
    def zeros(batch_size: int, hidden_size: int, context: ModelContext) -> "LSTMState":
        hidden = jnp.zeros((batch_size, hidden_size), context.precision.compute)
        return LSTMState(hidden, jnp.zeros((batch_size, hidden_size), jnp.float32))


def apply_matrix(
    x: jax.Array,  # [B, rows]
    matrix: jax.Array,  # [rows, *outputs]
) -> jax.Array:  # [B, *outputs]
    """Multiply the vector of one token by a matrix."""
    return (x @ matrix.reshape(matrix.shape[0], -1)).reshape(x.shape[0], *matrix.shape[1:])


def lstm_step(
    state: LSTMState,
    gates: jax.Array,  # [B, 4, H] what is summed before the gates' sigmoids and the tanh
) -> LSTMState:
    """Compute c = f c + i g, h = o tanh(c) (Hochreiter and Schmidhuber 1997; Gers et al. 2000)."""
    i, f, g, o = (gates[:, gate].astype(jnp.float32) for gate in range(len(LSTM_GATES)))
    cell = jax.nn.sigmoid(f) * state.cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return LSTMState(hidden.astype(state.hidden.dtype), cell)


def lstm_bias_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return the gate bias [4, H]: 1 for the forget gate (Jozefowicz et al. 2015), else 0."""
    return jnp.zeros(shape, dtype).at[LSTM_GATES.index("forget")].set(1)


def recurrent_weight(
    module: nn.Module,
    name: str,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    context: ModelContext,
    init: Initializer | None = None,
) -> jax.Array:  # [*inputs, *outputs]
    """Declare a weight that is used inside the scan, cast to the compute dtype."""
    init = RECURRENT_INIT.matrix_initializer(inputs) if init is None else init
    dtype = context.precision.parameters
    w = declare_weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)
    return w.astype(context.precision.compute)


def lstm_input_gates(
    module: nn.Module,
    x: jax.Array,  # [B, T, inputs]
    inputs: Mapping[str, int],
    hidden_size: int,  # H
    context: ModelContext,
) -> tuple[jax.Array, jax.Array]:  # [B, T, 4, H], [H, 4, H]
    """Declare the weights of an LSTM; return gate inputs of all tokens and the recurrent matrix."""
    outputs = {"gates": len(LSTM_GATES), "hidden": hidden_size}
    gates = apply_linear(module, "input", x, inputs, outputs, context, bias=False)
    bias = recurrent_weight(module, "bias", {}, outputs, context, lstm_bias_init)
    recurrent = recurrent_weight(module, "recurrent", {"state": hidden_size}, outputs, context)
    return gates + bias[None, None], recurrent


class LSTMLayer(nn.Module):
    """Unidirectional LSTM."""

    hidden_size: int  # H
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, inputs]
        line: DocumentBoundaries | None,
        state: LSTMState | None = None,  # None: zeros
        seeds: LSTMState | None = None,  # [B, T, H] each, of documents that begin; None: zeros
    ) -> tuple[LSTMState, jax.Array]:  # [B, T, H]
        gates, recurrent = lstm_input_gates(
            self, x, {"embed": x.shape[-1]}, self.hidden_size, self.context
        )

        def cell(state: LSTMState, gates: jax.Array) -> tuple[LSTMState, jax.Array]:
            state = lstm_step(state, gates + apply_matrix(state.hidden, recurrent))
            return state, state.hidden

        state = (
            LSTMState.zeros(x.shape[0], self.hidden_size, self.context) if state is None else state
        )
        return scan_cell(cell, state, gates, line, seeds)
