"""The log-sum-exp in one pass over its input (Milakov & Gimelshein 2018), as in flash attention.

Online normalizer calculation for softmax, algorithm 3: a maximum m and a sum of exp(z - m) are
combined pair by pair, where the usual form reads the input once for each. Exponentials are cheap on
a GPU, and the logits of a vocabulary are long.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def logsumexp_in_one_pass(x: jax.Array, axis: int) -> jax.Array:
    """Return log sum exp(x) over an axis, which must not be sharded, in the dtype of x.

    The sum is float32: in 16 bits, 50,000 equal terms would stop adding up after some hundred.
    """

    def combine(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
        (max_a, sum_a), (max_b, sum_b) = a, b
        largest = jnp.maximum(max_a, max_b)
        return largest, sum_a * jnp.exp(max_a - largest) + sum_b * jnp.exp(max_b - largest)

    wide = x.astype(jnp.float32)
    # Not -inf, whose difference to itself is NaN.
    start = jnp.finfo(jnp.float32).min, jnp.float32(0)
    largest, total = jax.lax.reduce((wide, jnp.ones_like(wide)), start, combine, (axis % x.ndim,))
    return (largest + jnp.log(total)).astype(x.dtype)


@logsumexp_in_one_pass.defjvp
def _jvp(axis: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # JAX cannot differentiate a reduction by a function of one's own. The gradient is the softmax.
    (x,), (dx,) = primals, tangents
    y = logsumexp_in_one_pass(x, axis)
    return y, jnp.sum(jnp.exp(x - jnp.expand_dims(y, axis)) * dx, axis)
