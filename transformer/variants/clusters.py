"""Centroids of k-means as weights: which of them is near, and the loss that moves them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.norms import layer_norm
from transformer.shared import Shared
from transformer.weights import weight

EPSILON = 1e-5


def unit(x: jax.Array, shared: Shared) -> jax.Array:  # [B, T, N, H] -> [B, T, N, H]
    """Layer norm without gain and bias: vectors of length sqrt(H), so that near is alike."""
    wide = x.astype(shared.precision.norm)
    ones = jnp.ones(x.shape[-1:], wide.dtype)
    return layer_norm(wide, ones, None, EPSILON).astype(x.dtype)


def centroids(
    module: nn.Module,
    heads: int,  # N
    count: int,  # E
    width: int,  # H
    shared: Shared,
) -> jax.Array:  # [N, E, H]
    """Declares them. They start about as long as the vectors that they are to stand for."""
    outputs = {"heads": heads, "clusters": count, "head": width}
    init, dtype = nn.initializers.normal(1.0), shared.precision.parameters
    return weight(module, "centroids", outputs=outputs, init=init, dtype=dtype)


def affinity(
    x: jax.Array,  # [B, T, N, H]
    middle: jax.Array,  # [N, E, H]
) -> jax.Array:  # [B, N, T, E] float32
    """-|x - c|^2 / 2 for each centroid c: largest of the nearest. No gradient reaches x."""
    wide, middle = (each.astype(jnp.float32) for each in (jax.lax.stop_gradient(x), middle))
    products = jnp.einsum("BTNH,NEH->BNTE", wide, middle)
    square = lambda each: jnp.sum(jnp.square(each), axis=-1)  # noqa: E731
    return products - (square(wide).swapaxes(1, 2)[..., None] + square(middle)[None, :, None]) / 2


def distance(
    near: Sequence[jax.Array],  # affinities [B, N, T, E]
    documents: jax.Array | None,  # [B or 1, T] 0 is padding; None: there is none
) -> jax.Array:  # a number
    """The mean over tokens and heads of the squared distance to the nearest centroid.

    What k-means minimises. Its gradient draws each centroid to the mean of its tokens.
    """
    squares = jnp.concatenate([-2 * each.max(-1) for each in near])  # [B, N, T] or [2 B, N, T]
    if documents is None:
        return jnp.mean(squares)
    shape = (len(near), len(near[0]), *documents.shape[1:])
    real = jnp.broadcast_to(documents != 0, shape).reshape(len(squares), 1, -1)
    return jnp.sum(squares * real) / jnp.maximum(jnp.sum(real) * squares.shape[1], 1)
