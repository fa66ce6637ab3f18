"""The nonlinearities of feed-forward layers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer.layer_configs import Activation as Activation


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
