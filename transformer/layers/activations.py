"""Activations of feed-forward layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.layers.basic import declare_weight
from transformer.layers.layer_config import FeedForwardConfig
from transformer.model_context import ModelContext


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


def cap_logits(logits: jax.Array, soft_cap: float) -> jax.Array:  # [...] -> [...]
    """Return c tanh(logits / c) (Gemma Team 2024, section 2), or the logits if c is 0."""
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


def clamped_gate(
    gate: jax.Array,  # [..., F]
    up: jax.Array,  # [..., F]
    activation: Callable[[jax.Array], jax.Array],
    limit: float,
) -> jax.Array:  # [..., F]
    """Return activation(min(gate, c)) * (1 + clip(up, -c, c)) (gpt-oss; `gate_clamp`)."""
    return activation(jnp.minimum(gate, limit)) * (1 + jnp.clip(up, -limit, limit))


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
