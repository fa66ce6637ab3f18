"""Recurrent mixers, and the scan over time that all recurrent mixers share.

- `ElmanRNN` (Elman 1990), optionally with a deep transition.
- `LSTM` (Hochreiter and Schmidhuber 1997), unidirectional or bidirectional.

What does not depend on the previous state, such as the inputs' part of the gates, is computed for
all tokens before the scan: one large product in place of T small ones that wait for each other.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Float32

from transformer.attention.document_boundaries import DocumentBoundaries, document_boundaries
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
)
from transformer.layers.basic import apply_linear, declare_weight
from transformer.model_context import Initialization, Initializer, ModelContext
from transformer.validation import Bounds, NonNegativeInt

RecurrentCell = Callable[[Any, Any], tuple[Any, Any]]
"""(state [B, ...], inputs of one token [B, ...]) -> (state, output [B, ...])."""


def scan_cell(
    cell: RecurrentCell,
    state: Any,  # [B, ...] before the first token
    inputs: Any,  # [B, T, ...]
    boundaries: DocumentBoundaries | None,
    initial_states: Any = None,  # [B, T, ...] state with which a document begins; None: zeros
) -> tuple[Any, Any]:  # the state after the last token, the outputs [B, T, ...]
    """Run a cell over the tokens of each row. Outputs at padding are zero.

    Without boundaries no document begins, and `initial_states` are not read.
    """

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
        y = _where(boundaries.is_token, y, jax.tree.map(jnp.zeros_like, y))
    return state, y


def _where(flags: jax.Array, on_true: Any, on_false: Any) -> Any:
    """Select leaves [B, ...] or [B, T, ...] by flags [B or 1] or [B or 1, T]."""

    def select(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(flags.reshape(flags.shape + (1,) * (b.ndim - flags.ndim)), a, b)

    return jax.tree.map(select, on_true, on_false)


def _swap_batch_and_time(tree: Any) -> Any:
    """Swap the first two axes: [B, T, ...] <-> [T, B, ...]."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)


RECURRENT_INIT = Initialization(std=0.0, depth_scaled=False)
"""Initialization of matrices inside the scan, whatever the model uses elsewhere.

They are applied T times in a row: much smaller matrices forget, much larger ones saturate.
"""


def apply_matrix(
    x: Float[Array, "B rows"],
    matrix: Float[Array, "rows *outputs"],
) -> Float[Array, "B *outputs"]:
    """Multiply the vector of one token by a matrix."""
    return (x @ matrix.reshape(matrix.shape[0], -1)).reshape(x.shape[0], *matrix.shape[1:])


def recurrent_weight(
    module: nn.Module,
    name: str,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    context: ModelContext,
    init: Initializer | None = None,
) -> Float[Array, "..."]:  # [*inputs, *outputs]
    """Declare a weight that is used inside the scan, cast to the compute dtype."""
    init = RECURRENT_INIT.matrix_initializer(inputs) if init is None else init
    dtype = context.precision.parameters
    w = declare_weight(module, name, inputs=inputs, outputs=outputs, init=init, dtype=dtype)
    return w.astype(context.precision.compute)


@dataclasses.dataclass(frozen=True)
class ElmanConfig(MixerConfig):
    """Simple recurrent network (Elman 1990): h_t = tanh(W x_t + U h_(t-1) + b)."""

    kind: ClassVar[str] = "elman"

    hidden_size: NonNegativeInt = 0
    """H, width of the state; 0: D. If H differs from D, the output is projected to D."""
    transition_depth: Annotated[int, Bounds(1, 10_000)] = 1
    """Number of layers from one state to the next. More than 1 makes the transition an MLP of x_t
    and h_(t-1) (deep transition, Pascanu et al. 2014)."""


@register_mixer
class ElmanRNN(Mixer):
    """Recurrent state at each token."""

    config: ElmanConfig

    @staticmethod
    def abilities(config: ElmanConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def score_flops(config: ElmanConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Float[Array, "B H"]:  # the state h
        width = self.config.hidden_size or self.context.d_model
        return jnp.zeros((batch, width), self.context.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_mask_patterns(config.kind, inputs.mask)
        width = config.hidden_size or context.d_model
        embed, hidden, state = {"embed": context.d_model}, {"hidden": width}, {"state": width}
        # One product for all tokens, before the scan: only the recurrent product is sequential.
        input_terms = apply_linear(self, "input", x, embed, hidden, context, bias=True)
        recurrent = recurrent_weight(self, "recurrent", state, hidden, context)
        zeros = nn.initializers.zeros
        transition = [
            (
                recurrent_weight(self, f"deeper_{layer}", state, hidden, context),
                recurrent_weight(self, f"deeper_{layer}_bias", {}, hidden, context, zeros),
            )
            for layer in range(1, config.transition_depth)
        ]

        def cell(h: jax.Array, input_term: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(input_term + apply_matrix(h, recurrent))
            for matrix, bias in transition:
                h = jnp.tanh(apply_matrix(h, matrix) + bias[None])
            return h, h

        cached = inputs.cache is not None
        boundaries = document_boundaries(inputs.mask, inputs.positions, cached=cached)
        before = inputs.cache if cached else self.init_cache(*x.shape[:2])
        after, y = scan_cell(cell, before, input_terms, boundaries)
        if width != context.d_model:
            y = apply_linear(self, "output", y, hidden, embed, context, bias=True, residual=True)
        return MixerOutput(y, after if cached else None, {})


LSTM_GATES = ("input", "forget", "candidate", "output")
"""Order of the gates in the weights; the same as PyTorch's."""


class LSTMState(struct.PyTreeNode):
    """Recurrent state of an LSTM, which is also its cache."""

    hidden: Float[Array, "B H"]
    cell: Float32[Array, "B H"]  # a sum over all tokens, which must not lose digits

    @classmethod
    def empty(cls, batch: int, hidden_size: int, context: ModelContext) -> "LSTMState":
        """Return the state before the first token."""
        shape = (batch, hidden_size)
        return cls(jnp.zeros(shape, context.precision.compute), jnp.zeros(shape, jnp.float32))


def lstm_step(
    state: LSTMState,
    gates: Float[Array, "B 4 H"],  # arguments of the gates' sigmoids and of the tanh
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


def lstm_input_gates(
    module: nn.Module,
    x: Float[Array, "B T inputs"],
    hidden_size: int,  # H
    context: ModelContext,
) -> tuple[Float[Array, "B T 4 H"], Float[Array, "H 4 H"]]:
    """Declare the weights of an LSTM; return gate inputs of all tokens and the recurrent matrix."""
    embed = {"embed": x.shape[-1]}
    outputs = {"gates": len(LSTM_GATES), "hidden": hidden_size}
    gates = apply_linear(module, "input", x, embed, outputs, context, bias=False)
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
        x: Float[Array, "B T inputs"],
        boundaries: DocumentBoundaries | None,
        state: LSTMState | None = None,  # None: zeros
        initial_states: LSTMState | None = None,  # [B, T, H] each, as in `scan_cell`
    ) -> tuple[LSTMState, Float[Array, "B T H"]]:
        gates, recurrent = lstm_input_gates(self, x, self.hidden_size, self.context)

        def cell(state: LSTMState, gates: jax.Array) -> tuple[LSTMState, jax.Array]:
            state = lstm_step(state, gates + apply_matrix(state.hidden, recurrent))
            return state, state.hidden

        if state is None:
            state = LSTMState.empty(x.shape[0], self.hidden_size, self.context)
        return scan_cell(cell, state, gates, boundaries, initial_states)


def read_backward(
    lstm: LSTMLayer,
    x: Float[Array, "B T inputs"],
    inputs: MixerInputs,
) -> Float[Array, "B T H"]:
    """Return the outputs of an LSTM that reads each document from its end."""
    boundaries = document_boundaries(inputs.mask, inputs.positions, backward=True)
    return jnp.flip(lstm(jnp.flip(x, axis=1), boundaries)[1], axis=1)


@dataclasses.dataclass(frozen=True)
class LSTMConfig(MixerConfig):
    """LSTM with a forget gate whose bias starts at 1 (Gers et al. 2000; Jozefowicz et al. 2015).

    The cache is the state. A unidirectional LSTM is causal with or without a causal mask.
    """

    kind: ClassVar[str] = "lstm"

    hidden_size: NonNegativeInt = 0
    """H, width of each direction. 0: the outputs of all directions together are D wide. Any other
    width is projected to D."""
    bidirectional: bool = False
    """Also read each document backward (Schuster and Paliwal 1997). Not under a causal mask."""

    def check_d_model(self, d_model: int) -> None:
        self.resolved_hidden_size(d_model)

    def resolved_hidden_size(self, d_model: int) -> int:
        """Return H for a model of width D.

        Raises:
          ValueError: D has to be halved and is odd.
        """
        if self.bidirectional and not self.hidden_size and d_model % 2:
            raise ValueError(
                f"LSTMConfig.bidirectional: halves the width {d_model}, which is odd; give an even "
                "width, or set hidden_size"
            )
        return self.hidden_size or d_model // (1 + self.bidirectional)


@register_mixer
class LSTM(Mixer):
    """Hidden state of each token; both directions are concatenated."""

    config: LSTMConfig

    @staticmethod
    def abilities(config: LSTMConfig) -> Abilities:
        forward = not config.bidirectional
        return Abilities(causal=forward, cached=forward, cross=False, weights=False)

    @staticmethod
    def score_flops(config: LSTMConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LSTMState:
        self.check_not_bidirectional("a cache")
        hidden_size = self.config.resolved_hidden_size(self.context.d_model)
        return LSTMState.empty(batch, hidden_size, self.context)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_mask_patterns(config.kind, inputs.mask)
        width = config.resolved_hidden_size(context.d_model)
        cached = inputs.cache is not None
        boundaries = document_boundaries(inputs.mask, inputs.positions, cached=cached)
        state, y = LSTMLayer(width, context, name="forward")(x, boundaries, inputs.cache)
        if config.bidirectional:
            if inputs.mask.pattern.causal:
                self.check_not_bidirectional("a causal mask")
            backward = LSTMLayer(width, context, name="backward")
            y = jnp.concatenate([y, read_backward(backward, x, inputs)], axis=-1)
        if y.shape[-1] != context.d_model:
            hidden, embed = {"hidden": y.shape[-1]}, {"embed": context.d_model}
            y = apply_linear(self, "output", y, hidden, embed, context, bias=True, residual=True)
        return MixerOutput(y, state if cached else None, {})

    @nn.nowrap
    def check_not_bidirectional(self, requested: str) -> None:
        if self.config.bidirectional:
            raise ValueError(
                "mixer lstm: bidirectional reads later tokens, so it does not support "
                f"{requested}; use it in an encoder, or set bidirectional to False"
            )
