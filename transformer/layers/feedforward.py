"""Feed-forward layers: plain (Vaswani et al. 2017, section 3.3) and gated (Shazeer 2020)."""

from typing import NamedTuple

import jax
from flax import linen as nn

from transformer.attention.mixer import NO_OUTPUTS, Outputs
from transformer.layers.activations import ACTIVATIONS, clamped_gate, declare_swish
from transformer.layers.basic import apply_linear, dropout
from transformer.layers.layer_config import FeedForwardConfig
from transformer.model_context import ModelContext


class FeedForwardOutput(NamedTuple):
    """Result of a feed-forward or mixture of experts."""

    y: jax.Array  # [B, T, D]
    aux: dict[str, jax.Array]  # auxiliary losses of a mixture of experts, if requested


def resolve_d_ff(config: FeedForwardConfig, d_model: int) -> int:
    """Return F: `d_ff`, or 4 D, or 8/3 D in multiples of 64 if gated (as many weights)."""
    return config.d_ff or (-(-8 * d_model // (3 * 64)) * 64 if config.gated else 4 * d_model)


class FeedForward(nn.Module):
    """Compute down(activation(up x)), or down(activation(gate x) * up x) if gated."""

    config: FeedForwardConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        dropout_rngs: jax.Array | None = None,  # [B]
        *,
        token_mask: jax.Array | None = None,  # [B, T] unused: padding does not affect other tokens
        outputs: Outputs = NO_OUTPUTS,
    ) -> FeedForwardOutput:
        config, context = self.config, self.context
        embed = {"embed": context.d_model}
        mlp = {"mlp": resolve_d_ff(config, context.d_model)}
        activation = ACTIVATIONS.get(config.activation) or declare_swish(self, config, context)
        linear = lambda name: apply_linear(self, name, x, embed, mlp, context, bias=config.bias)  # noqa: E731
        if context.hardware.platform == "gpu":
            from transformer.layers.feedforward_on_gpu import recomputed_hidden_units

            hidden = recomputed_hidden_units(self, x, activation, embed, mlp)
        elif not config.gated:
            hidden = activation(linear("up"))
        elif not config.gate_clamp:
            hidden = activation(linear("gate")) * linear("up")
        else:
            hidden = clamped_gate(linear("gate"), linear("up"), activation, config.gate_clamp)
        hidden = context.constrain(hidden, ("batch", "length", "mlp"))
        hidden = dropout(hidden, config.dropout, dropout_rngs)
        y = apply_linear(self, "down", hidden, mlp, embed, context, bias=config.bias, residual=True)
        return FeedForwardOutput(y, {})
