"""Recurrent cells as functions, and how the weights inside a loop over time are declared."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.linear import linear
from transformer.recurrent.scan import Timeline, recur
from transformer.shared import Shared
from transformer.weights import Initialization, Initializer, weight

BY_FAN_IN = Initialization(std=0.0, depth_scaled=False)
"""How matrices inside the loop start, whatever the rest of the model does: they are applied T times
in a row, so much smaller ones would forget and much larger ones saturate."""

GATES = ("input", "forget", "candidate", "output")
"""In the order in which their weights lie, which is PyTorch's."""


class LSTMState(struct.PyTreeNode):
    """What an LSTM remembers; also its cache, of a size that does not grow."""

    hidden: jax.Array  # [B, H]
    cell: jax.Array  # [B, H] float32: a sum over all time must not lose digits

    @staticmethod
    def zeros(batch: int, width: int, shared: Shared) -> "LSTMState":
        hidden = jnp.zeros((batch, width), shared.precision.compute)
        return LSTMState(hidden, jnp.zeros((batch, width), jnp.float32))


def times(
    x: jax.Array,  # [B, rows]
    matrix: jax.Array,  # [rows, *outputs]
) -> jax.Array:  # [B, *outputs]
    """The product of one token with a matrix."""
    return (x @ matrix.reshape(len(matrix), -1)).reshape(len(x), *matrix.shape[1:])


def lstm_step(
    state: LSTMState,
    gates: jax.Array,  # [B, 4, H] what is summed before the gates' sigmoids and the tanh
) -> LSTMState:
    """c = f c + i g, h = o tanh(c) (Hochreiter and Schmidhuber 1997; Gers et al. 2000)."""
    i, f, g, o = (gates[:, gate].astype(jnp.float32) for gate in range(len(GATES)))
    cell = jax.nn.sigmoid(f) * state.cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return LSTMState(hidden.astype(state.hidden.dtype), cell)


def forget_less(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """The bias of the gates [4, H]: 1 for the forget gate (Jozefowicz et al. 2015), else 0."""
    return jnp.zeros(shape, dtype).at[GATES.index("forget")].set(1)


def inner_weight(
    module: nn.Module,
    name: str,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    shared: Shared,
    init: Initializer | None = None,
) -> jax.Array:  # [*inputs, *outputs]
    """Declares a weight that is used inside the loop over time, in the dtype of products."""
    init = BY_FAN_IN.matrix(inputs) if init is None else init
    dtype = shared.precision.parameters
    w = weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)
    return w.astype(shared.precision.compute)


def lstm_gates(
    module: nn.Module,
    x: jax.Array,  # [B, T, inputs]
    inputs: Mapping[str, int],
    width: int,  # H
    shared: Shared,
) -> tuple[jax.Array, jax.Array]:  # [B, T, 4, H], [H, 4, H]
    """An LSTM's weights: what the inputs add to the gates, all at once, and the matrix of h."""
    outputs = {"gates": len(GATES), "hidden": width}
    gates = linear(module, "input", x, inputs, outputs, shared, bias=False)
    bias = inner_weight(module, "bias", {}, outputs, shared, forget_less)
    recurrent = inner_weight(module, "recurrent", {"state": width}, outputs, shared)
    return gates + bias[None, None], recurrent


class LSTMLayer(nn.Module):
    """An LSTM in one direction."""

    width: int  # H
    shared: Shared

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, inputs]
        line: Timeline | None,
        state: LSTMState | None = None,  # None: zeros
        seeds: LSTMState | None = None,  # [B, T, H] each, of documents that begin; None: zeros
    ) -> tuple[LSTMState, jax.Array]:  # [B, T, H]
        gates, recurrent = lstm_gates(self, x, {"embed": x.shape[-1]}, self.width, self.shared)

        def cell(state: LSTMState, gates: jax.Array) -> tuple[LSTMState, jax.Array]:
            state = lstm_step(state, gates + times(state.hidden, recurrent))
            return state, state.hidden

        state = LSTMState.zeros(len(x), self.width, self.shared) if state is None else state
        return recur(cell, state, gates, line, seeds)
