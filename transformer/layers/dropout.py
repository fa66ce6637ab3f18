"""Dropout (Srivastava et al. 2014) with one random key for each example.

An example's mask depends on its key alone, so it does not depend on how a batch is split into
microbatches, devices or hosts.
"""

import jax
import jax.numpy as jnp


def dropout(
    x: jax.Array,  # [B, ...]
    dropout_rate: float,
    dropout_rngs: jax.Array | None,  # [B] typed random keys; None: not training
) -> jax.Array:  # [B, ...]
    """Zero each entry with probability `dropout_rate` and divide the others by 1 - rate."""
    if dropout_rngs is None or dropout_rate == 0:
        return x
    draw = lambda key: jax.random.bernoulli(key, 1 - dropout_rate, x.shape[1:])  # noqa: E731
    return jnp.where(jax.vmap(draw)(dropout_rngs), x / (1 - dropout_rate), jnp.zeros_like(x))


def fold_in(
    rngs: jax.Array | None,  # [B]
    data: int | jax.Array,
) -> jax.Array | None:  # [B]
    """Return `jax.random.fold_in` of each key of a batch; None stays None."""
    if rngs is None:
        return None
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(rngs, data)
