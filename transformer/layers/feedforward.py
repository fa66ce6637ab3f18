"""The nonlinearities of feed-forward layers.

The feed-forward layer, plain (Vaswani et al. 2017, section 3.3) and gated (Shazeer 2020).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.base import NO_OUTPUTS, Outputs
from transformer.context import ModelContext
from transformer.layers.config import FeedForwardConfig
from transformer.layers.dropout import dropout
from transformer.layers.params import apply_linear, declare_weight


def swish(
    x: jax.Array,  # [...]
    beta: float | jax.Array,  # a number
) -> jax.Array:  # [...]
    """x sigmoid(beta x) (Ramachandran et al. 2017): SiLU at beta = 1, towards ReLU as it grows."""
    return x * jax.nn.sigmoid(beta * x)


def squared_relu(x: jax.Array) -> jax.Array:  # [...] -> [...]
    """max(0, x)^2 (So et al. 2021, Primer)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "squared_relu": squared_relu,
}
"""Those without a parameter. GELU is exact, with erf, or approximated by tanh (as in GPT-2)."""


class FeedForwardOutput(NamedTuple):
    """The result, and auxiliary losses where a kind has them."""

    y: jax.Array  # [B, T, D]
    aux: dict[str, jax.Array]


class FeedForward(nn.Module):
    """down(activation(up x)), or down(activation(gate x) * up x) when gated."""

    config: FeedForwardConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        dropout_rngs: jax.Array | None = None,  # [B]
        *,
        real: jax.Array | None = None,  # [B, T] booleans: no padding. Each token is on its own here
        outputs: Outputs = NO_OUTPUTS,
    ) -> FeedForwardOutput:
        config, shared = self.config, self.context
        embed, mlp = {"embed": shared.d_model}, {"mlp": config.resolved_d_ff(shared.d_model)}
        activation = declare_activation(self, config, shared)
        if config.gated:
            gate = apply_linear(self, "gate", x, embed, mlp, shared, bias=config.bias)
            hidden = activation(gate) * apply_linear(
                self, "up", x, embed, mlp, shared, bias=config.bias
            )
        else:
            hidden = activation(apply_linear(self, "up", x, embed, mlp, shared, bias=config.bias))
        hidden = shared.constrain(hidden, ("batch", "length", "mlp"))
        hidden = dropout(hidden, config.dropout, dropout_rngs)
        y = apply_linear(self, "down", hidden, mlp, embed, shared, bias=config.bias, residual=True)
        return FeedForwardOutput(y, {})


def declare_activation(
    module: nn.Module, config: FeedForwardConfig, context: ModelContext
) -> Callable[[jax.Array], jax.Array]:
    """The activation function of a configuration; a learned beta becomes a weight of `module`."""
    if config.activation in ACTIVATIONS:
        return ACTIVATIONS[config.activation]
    beta: float | jax.Array = config.swish_beta
    if config.activation == "learned_swish":
        start, precision = nn.initializers.constant(config.swish_beta), context.precision
        learned = declare_weight(module, "beta", outputs={}, init=start, dtype=precision.parameters)
        beta = learned.astype(precision.compute)
    return lambda x: swish(x, beta)
