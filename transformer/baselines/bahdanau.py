"""GRU decoder with additive attention (Bahdanau, Cho and Bengio 2015, section 3, appendix A)."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float

from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.baselines.memory_attention import (
    MemoryAttentionCache,
    additive_score_fn,
    attend_with_scores,
    decoder_boundaries,
    first_token_state,
    first_visible,
    keys_and_values,
    memory_score_flops,
    needs_memory_cache_error,
    project_keys,
    visible_memory,
)
from transformer.baselines.recurrent import apply_matrix, recurrent_weight, scan_cell
from transformer.layers.basic import apply_linear
from transformer.validation import NonNegativeInt


@dataclasses.dataclass(frozen=True)
class BahdanauConfig(MixerConfig):
    """GRU decoder that attends to the memory before each step (Bahdanau et al. 2015).

    The initial state is computed from the first memory vector. That vector should summarize the
    whole source, so use a bidirectional encoder, as the paper does.
    """

    kind: ClassVar[str] = "bahdanau"
    reads_memory: ClassVar[bool] = True

    hidden_size: NonNegativeInt = 0
    """H, width of the state; 0: D."""
    score_size: NonNegativeInt = 0
    """A, width of the hidden layer of the additive score; 0: H."""

    def resolved_sizes(self, d_model: int) -> tuple[int, int]:
        """Return H and A for a model of width D."""
        hidden_size = self.hidden_size or d_model
        return hidden_size, self.score_size or hidden_size


GRU_GATES = ("update", "reset", "candidate")


@register_mixer
class BahdanauDecoder(Mixer):
    """Deep output of each token: from the previous state, the token and the context."""

    config: BahdanauConfig

    @staticmethod
    def abilities(config: BahdanauConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def score_flops(config: BahdanauConfig, width: int, length: int) -> ScoreFlops:
        return memory_score_flops(config.resolved_sizes(width)[1], width, length)

    @property
    def sizes(self) -> tuple[int, int]:
        """H and A."""
        return self.config.resolved_sizes(self.context.d_model)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> MemoryAttentionCache:
        raise needs_memory_cache_error(self.config.kind)

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryAttentionCache:
        hidden_size, score_size = self.sizes
        state = jnp.zeros((batch, hidden_size), self.context.precision.compute)
        return MemoryAttentionCache.empty(state, batch, length, score_size, self.context)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        context, (hidden_size, score_size) = self.context, self.sizes
        embed, hidden = {"embed": context.d_model}, {"hidden": hidden_size}
        visible = visible_memory(self.config.kind, inputs, x.shape[1])
        initial_states = new_keys = None
        if inputs.memory is not None:
            first = first_visible(inputs.memory, visible)
            initial = apply_linear(self, "first", first, embed, hidden, context, bias=True)
            initial_states = jnp.tanh(initial)
            new_keys = project_keys(self, inputs.memory, score_size, context)
        keys, values, cache = keys_and_values(inputs, new_keys, x.dtype)
        state = first_token_state(initial_states) if cache is None else cache.state
        all_gates = {"gates": len(GRU_GATES), **hidden}
        input_gates = apply_linear(self, "input", x, embed, all_gates, context, bias=True)
        score_fn = additive_score_fn(self, hidden_size, score_size, context)
        state_axes = {"state": hidden_size}
        gates = recurrent_weight(self, "gates", state_axes, {"gates": 2, **hidden}, context)
        candidate = recurrent_weight(self, "candidate", state_axes, hidden, context)
        context_gates = recurrent_weight(self, "context", embed, all_gates, context)

        def cell(
            s: Float[Array, "B H"],
            step_inputs: tuple[Float[Array, "B 3 H"], Bool[Array, "#B S"]],
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
            input_gates, visible = step_inputs
            # Letters of appendix A.2.2: s (state), c (context), z (update), r (reset).
            c, weights = attend_with_scores(
                score_fn(s, keys), visible, values, context.precision.softmax
            )
            gate_inputs = input_gates + apply_matrix(c, context_gates)
            z_and_r = jax.nn.sigmoid(gate_inputs[:, :2] + apply_matrix(s, gates))
            z, r = z_and_r[:, 0], z_and_r[:, 1]
            new = (1 - z) * s + z * jnp.tanh(gate_inputs[:, 2] + apply_matrix(r * s, candidate))
            # Attention and the output of a token use the state before it (s_(i-1) in the paper).
            return new, (s, c, weights)

        boundaries = decoder_boundaries(inputs)
        state, (states, contexts, weights) = scan_cell(
            cell, state, (input_gates, visible), boundaries, initial_states
        )
        y = self.deep_output(states, x, contexts)
        aux = {"weights": weights[:, None]} if "weights" in inputs.outputs else {}
        return MixerOutput(y, None if cache is None else cache.replace(state=state), aux)

    def deep_output(
        self,
        states: Float[Array, "B T H"],  # before each token
        x: Float[Array, "B T D"],
        contexts: Float[Array, "B T D"],
    ) -> Float[Array, "B T D"]:
        """Return the maximum of two linear maps of all three (maxout, Goodfellow et al. 2013)."""
        width = self.context.d_model
        # `pieces`: the two linear maps of which maxout takes the larger (appendix A.2.2, t_i).
        pieces, embed = {"pieces": 2, "hidden": width}, {"embed": width}
        add = functools.partial(
            apply_linear, self, outputs=pieces, context=self.context, residual=True
        )
        state_term = add("output_state", states, {"state": states.shape[-1]}, bias=True)
        token_term = add("output_token", x, embed, bias=False)
        context_term = add("output_context", contexts, embed, bias=False)
        return jnp.max(state_term + token_term + context_term, axis=2)
