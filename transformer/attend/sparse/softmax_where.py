"""A softmax over the keys that each query has chosen for itself."""

import jax
import jax.numpy as jnp


def softmax_where(
    scores: jax.Array,  # [..., S]
    where: jax.Array,  # [..., S] booleans
) -> tuple[jax.Array, jax.Array]:  # [..., S], [...]
    """Weights, and the logarithm of the sum of the exponents of what is chosen.

    Of a query that has chosen nothing: zeros and -inf, and no gradient.
    """
    scores = jnp.where(where, scores, -jnp.inf)
    largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    raised = jnp.exp(scores - largest)
    total = raised.sum(-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1)
    return raised / total, jnp.where(some, largest + jnp.log(total), -jnp.inf)[..., 0]
