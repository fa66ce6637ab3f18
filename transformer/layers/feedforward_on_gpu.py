"""The inner half of a feed-forward layer on a GPU: less memory traffic, and GELU without erf.

On a GPU arithmetic is cheaper than reading and writing the hidden units, the largest arrays of a
layer.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from transformer.layers.activations import clamped_gate
from transformer.layers.basic import apply_matrix, declare_linear

if TYPE_CHECKING:
    from transformer.layers.feedforward import FeedForward

Activation = Callable[[jax.Array], jax.Array]


def recomputed_hidden_units(
    layer: "FeedForward",
    x: jax.Array,  # [B, T, D]
    activation: Activation,
    embed: Mapping[str, int],
    mlp: Mapping[str, int],
) -> jax.Array:  # [B, T, F]
    """Return activation(up x), or activation(gate x) * up x, whose steps are not saved.

    Autodiff would save the steps of the activation. Only the products with the weights are saved;
    biases are added and the activation is computed again in the backward pass.
    """
    config, context = layer.config, layer.context
    activation = FORMS_ON_GPU.get(config.activation, activation)
    names = ("gate", "up") if config.gated else ("up",)
    weights = [declare_linear(layer, n, embed, mlp, context, bias=config.bias) for n in names]
    products = [apply_matrix(x, w, 1, context.flatten_tokens) for w, _ in weights]

    @jax.checkpoint
    def combine(products: list[jax.Array], biases: list[jax.Array | None]) -> jax.Array:
        pairs = zip(products, biases, strict=True)
        maps = [y if b is None else y + b.astype(y.dtype)[None, None] for y, b in pairs]
        if not config.gated:
            return activation(maps[0])
        gate, up = maps
        if config.gate_clamp:
            return clamped_gate(gate, up, activation, config.gate_clamp)
        return activation(gate) * up

    return combine(products, [b for _, b in weights])


@jax.custom_jvp
def gelu_by_exponential(x: jax.Array) -> jax.Array:  # [...] -> [...]
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


def _normal_cdf(x: jax.Array) -> jax.Array:  # [...] -> [...], float32
    """Return the distribution function of the standard normal distribution."""
    z = jnp.abs(x) * math.sqrt(0.5)
    t = 1 / (1 + 0.5 * z)
    exponent = jnp.polyval(jnp.array(ERFC_COEFFICIENTS, x.dtype), t, unroll=16) - jnp.square(z)
    tail = 0.5 * t * jnp.exp(exponent)
    return jnp.where(x < 0, tail, 1 - tail)


def gelu_tanh_by_sigmoid(x: jax.Array) -> jax.Array:  # [...] -> [...]
    """Return GELU's tanh approximation: (1 + tanh(u)) / 2 is sigmoid(2 u)."""
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * jax.nn.sigmoid(2 * u)


FORMS_ON_GPU: dict[str, Activation] = {
    "gelu": gelu_by_exponential,
    "gelu_tanh": gelu_tanh_by_sigmoid,
}
"""Equal functions in other forms. In bfloat16 on an H200, 100 million numbers and their gradient:
GELU by erf 304 and 342 microseconds, by tanh 135 and 181, by the sigmoid 131 and 161, ReLU 128 and
148. GELU by an exponential has not been timed (`python -m bench.activation_cost`)."""
