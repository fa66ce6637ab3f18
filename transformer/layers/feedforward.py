"""Feed-forward layers: plain (Vaswani et al. 2017, section 3.3) and gated (Shazeer 2020)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.base import NO_OUTPUTS, Outputs
from transformer.context import ModelContext
from transformer.layers.basic import apply_linear, declare_weight, dropout
from transformer.layers.config import FeedForwardConfig


def swish(
    x: jax.Array,  # [...]
    beta: float | jax.Array,  # a number
) -> jax.Array:  # [...]
    """Return x sigmoid(beta x) (Ramachandran et al. 2017): SiLU at 1, ReLU as beta grows."""
    return x * jax.nn.sigmoid(beta * x)


def squared_relu(x: jax.Array) -> jax.Array:  # [...] -> [...]
    """Return max(0, x)^2 (So et al. 2021, Primer)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "squared_relu": squared_relu,
}
"""Activations without parameters, by name."""


class FeedForwardOutput(NamedTuple):
    """Result of a feed-forward or mixture of experts."""

    y: jax.Array  # [B, T, D]
    aux: dict[str, jax.Array]  # auxiliary losses of a mixture of experts, if requested


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
        mlp = {"mlp": config.d_ff or config.default_d_ff(context.d_model)}
        activation = ACTIVATIONS.get(config.activation) or declare_swish(self, config, context)
        if config.gated:
            gate = activation(apply_linear(self, "gate", x, embed, mlp, context, bias=config.bias))
            hidden = gate * apply_linear(self, "up", x, embed, mlp, context, bias=config.bias)
        else:
            hidden = activation(apply_linear(self, "up", x, embed, mlp, context, bias=config.bias))
        hidden = context.constrain(hidden, ("batch", "length", "mlp"))
        if dropout_rngs is not None:
            hidden = dropout(hidden, config.dropout, dropout_rngs)
        y = apply_linear(self, "down", hidden, mlp, embed, context, bias=config.bias, residual=True)
        return FeedForwardOutput(y, {})


def declare_swish(
    module: nn.Module, config: FeedForwardConfig, context: ModelContext
) -> Callable[[jax.Array], jax.Array]:
    """Return `swish`; the beta of `learned_swish` becomes a weight of `module`."""
    beta: float | jax.Array = config.swish_beta
    if config.activation == "learned_swish":
        init, precision = nn.initializers.constant(config.swish_beta), context.precision
        learned = declare_weight(module, "beta", outputs={}, init=init, dtype=precision.parameters)
        beta = learned.astype(precision.compute)
    return lambda x: swish(x, beta)
