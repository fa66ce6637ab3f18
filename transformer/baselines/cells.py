"""Recurrent cells and the scan over time that all recurrent mixers share.

What does not depend on the previous state, such as the inputs' part of the gates, is computed for
all tokens before the scan: one large product in place of T small ones that wait for each other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.document_boundaries import DocumentBoundaries
from transformer.layers.basic import apply_linear, declare_weight
from transformer.model_context import Initialization, Initializer, ModelContext

RecurrentCell = Callable[[Any, Any], tuple[Any, Any]]
"""(state [B, ...], inputs of one token [B, ...]) -> (state, output [B, ...])."""


def scan_cell(
    cell: RecurrentCell,
    state: Any,  # [B, ...] before the first token
    inputs: Any,  # [B, T, ...]
    boundaries: DocumentBoundaries | None,
    initial_states: Any = None,  # [B, T, ...] state with which a document begins; None: zeros.
    # Ignored without boundaries, as no document begins then.
) -> tuple[Any, Any]:  # the state after the last token, the outputs [B, T, ...]
    """Run a cell over the tokens of each row. Outputs at padding are zero."""

    def step(state: Any, step_inputs: tuple[Any, DocumentBoundaries | None, Any]) -> Any:
        x, boundary, initial = step_inputs
        if boundary is None:
            return cell(state, x)
        initial = jax.tree.map(jnp.zeros_like, state) if initial is None else initial
        before = _where(boundary.is_start, initial, state)
        after, y = cell(before, x)
        # At padding the cell runs and its result is discarded: all rows take the same steps.
        return _where(boundary.is_token, after, before), y

    initial_states = None if boundaries is None else initial_states
    time_major = _swap_batch_and_time((inputs, boundaries, initial_states))
    state, y = jax.lax.scan(step, state, time_major)
    y = _swap_batch_and_time(y)
    if boundaries is not None:
        is_token = boundaries.is_token
        y = jax.tree.map(lambda leaf: jnp.where(_append_axes(is_token, leaf), leaf, 0), y)
    return state, y


def _where(flags: jax.Array, on_true: Any, on_false: Any) -> Any:
    """Select one state where the flags [B or 1] are set, the other elsewhere."""
    select = lambda a, b: jnp.where(_append_axes(flags, b), a, b)  # noqa: E731
    return jax.tree.map(select, on_true, on_false)


def _append_axes(flags: jax.Array, target: jax.Array) -> jax.Array:
    """Append axes of size 1 to the flags, up to the rank of `like`."""
    return flags.reshape(flags.shape + (1,) * (target.ndim - flags.ndim))


def _swap_batch_and_time(tree: Any) -> Any:
    """Swap the first two axes: [B, T, ...] <-> [T, B, ...]."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


RECURRENT_INIT = Initialization(std=0.0, depth_scaled=False)
"""Initialization of matrices inside the scan, whatever the model uses elsewhere.

They are applied T times in a row: much smaller matrices forget, much larger ones saturate.
"""


LSTM_GATES = ("input", "forget", "candidate", "output")
"""Order of the gates in the weights; the same as PyTorch's."""


class LSTMState(struct.PyTreeNode):
    """Recurrent state of an LSTM, which is also its cache."""

    hidden: jax.Array  # [B, H]
    cell: jax.Array  # [B, H] float32: a sum over all tokens, which must not lose digits

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        hidden_size: int,  # H
        dtype: Any,  # of `hidden`: the compute dtype
    ) -> "LSTMState":
        """Return the state before the first token."""
        shape = (batch_size, hidden_size)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, jnp.float32))


def apply_matrix(
    x: jax.Array,  # [B, rows]
    matrix: jax.Array,  # [rows, *outputs]
) -> jax.Array:  # [B, *outputs]
    """Multiply the vector of one token by a matrix."""
    return (x @ matrix.reshape(matrix.shape[0], -1)).reshape(x.shape[0], *matrix.shape[1:])


def lstm_step(
    state: LSTMState,
    gates: jax.Array,  # [B, 4, H] arguments of the gates' sigmoids and of the tanh
) -> LSTMState:
    """Compute c = f c + i g, h = o tanh(c) (Hochreiter and Schmidhuber 1997; Gers et al. 2000)."""
    # In float32 under every policy: near saturation 16-bit gates round to exactly 0 or 1, and the
    # cell is a sum over all tokens.
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
        boundaries: DocumentBoundaries | None,
        state: LSTMState | None = None,  # None: zeros
        initial_states: LSTMState | None = None,  # [B, T, H] each, as in `scan_cell`
    ) -> tuple[LSTMState, jax.Array]:  # [B, T, H]
        gates, recurrent = lstm_input_gates(
            self, x, {"embed": x.shape[-1]}, self.hidden_size, self.context
        )

        def cell(state: LSTMState, gates: jax.Array) -> tuple[LSTMState, jax.Array]:
            state = lstm_step(state, gates + apply_matrix(state.hidden, recurrent))
            return state, state.hidden

        if state is None:
            state = LSTMState.empty(x.shape[0], self.hidden_size, self.context.precision.compute)
        return scan_cell(cell, state, gates, boundaries, initial_states)
