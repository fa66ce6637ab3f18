"""Activations of feed-forward layers."""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

ActivationKind = Literal[
    "relu", "gelu", "gelu_tanh", "silu", "swish", "learned_swish", "squared_relu"
]


MaskedHeadActivation = Literal["relu", "gelu", "gelu_tanh", "silu", "squared_relu"]
PoolerActivation = Literal["tanh", "relu", "gelu", "gelu_tanh", "silu", "squared_relu"]


def swish(
    x: Float[Array, "..."],
    beta: float | Float[Array, ""],
) -> Float[Array, "..."]:
    """Return x sigmoid(beta x) (Ramachandran et al. 2017): SiLU at 1, ReLU as beta grows."""
    return x * jax.nn.sigmoid(beta * x)


def squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return max(0, x)^2 (So et al. 2021, Primer)."""
    return jnp.square(jax.nn.relu(x))


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x Phi(x) (Hendrycks and Gimpel 2016), in float32 or wider and rounded once.

    By erf, as PyTorch computes it. `jax.nn.gelu` takes erfc, which is exact to more digits below -3
    and takes a CPU three times as long.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


Activation = Callable[[jax.Array], jax.Array]


ACTIVATIONS: dict[str, Activation] = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "squared_relu": squared_relu,
}
"""Activations without parameters, by name."""


def cap_logits(logits: Float[Array, "..."], soft_cap: float) -> Float[Array, "..."]:
    """Return c tanh(logits / c) (Gemma Team 2024, section 2), or the logits if c is 0."""
    return soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits


def clamped_gate(
    gate: Float[Array, "... F"],
    up: Float[Array, "... F"],
    activation: Callable[[jax.Array], jax.Array],
    limit: float,
) -> Float[Array, "... F"]:
    """Return activation(min(gate, c)) * (1 + clip(up, -c, c)) (gpt-oss; `gate_clamp`)."""
    return activation(jnp.minimum(gate, limit)) * (1 + jnp.clip(up, -limit, limit))


# On a GPU arithmetic is cheaper than reading and writing the hidden units, the largest arrays of a
# layer.


@jax.custom_jvp
def gelu_by_exponential(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x Phi(x), GELU, with the normal distribution function Phi from an exponential.

    erfc by Press et al. (Numerical Recipes, 2nd edition, section 6.2), with a relative error below
    1.2e-7. XLA's erf is a quotient of polynomials, and takes a GPU longer than to read x and to
    write the result. In float32, rounded once.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_cdf(wide)).astype(x.dtype)


@gelu_by_exponential.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) / math.sqrt(2 * math.pi)
    slope = _normal_cdf(wide) + wide * density
    return gelu_by_exponential(x), (slope * dx.astype(jnp.float32)).astype(x.dtype)


ERFC_COEFFICIENTS = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)
"""Coefficients of a polynomial in t = 1 / (1 + z / 2), highest power first.

erfc(z) = t exp(-z^2 + polynomial(t)).
"""


def _normal_cdf(x: Float[Array, "..."]) -> Float32[Array, "..."]:
    """Return the distribution function of the standard normal distribution."""
    z = jnp.abs(x) * math.sqrt(0.5)
    t = 1 / (1 + 0.5 * z)
    exponent = jnp.polyval(jnp.array(ERFC_COEFFICIENTS, x.dtype), t, unroll=16) - jnp.square(z)
    tail = 0.5 * t * jnp.exp(exponent)
    return jnp.where(x < 0, tail, 1 - tail)


def gelu_tanh_by_sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return GELU's tanh approximation: (1 + tanh(u)) / 2 is sigmoid(2 u)."""
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * jax.nn.sigmoid(2 * u)


FORMS_ON_GPU: dict[str, Activation] = {
    "gelu": gelu_by_exponential,
    "gelu_tanh": gelu_tanh_by_sigmoid,
}
"""Equal functions in forms that take a GPU little longer than ReLU: by erf, GELU took it more than
twice as long (`python -m bench activations`)."""
