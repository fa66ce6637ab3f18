"""The log-sum-exp in one pass over its input (Milakov & Gimelshein 2018), as in flash attention.

Online normalizer calculation for softmax, algorithm 3: a maximum m and a sum of exp(z - m) are
combined pair by pair, where the usual form reads the input once for each. Exponentials are cheap on
a GPU, and the logits of a vocabulary are long.
"""

from typing import Any

import jax
import jax.numpy as jnp


def logsumexp_in_one_pass(x: jax.Array, axis: int) -> jax.Array:
    """Return log sum exp(x) over an axis, which must not be sharded. It has no gradient."""

    def combine(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
        (max_a, sum_a), (max_b, sum_b) = a, b
        largest = jnp.maximum(max_a, max_b)
        return largest, sum_a * jnp.exp(max_a - largest) + sum_b * jnp.exp(max_b - largest)

    # Not -inf, whose difference to itself is NaN.
    start = jnp.asarray(jnp.finfo(x.dtype).min, x.dtype), jnp.zeros((), x.dtype)
    axes = (axis % x.ndim,)
    largest, total = jax.lax.reduce((x, jnp.ones_like(x)), start, combine, axes)
    return largest + jnp.log(total)
