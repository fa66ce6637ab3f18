"""Centroids of k-means as weights: which of them is near, and the loss that moves them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.norms import layer_norm
from transformer.shared import ModelContext
from transformer.weights import declare_weight

LAYER_NORM_EPSILON = 1e-5


def layer_norm_without_affine(
    x: jax.Array, context: ModelContext
) -> jax.Array:  # [B, T, N, H] -> [B, T, N, H]
    """Layer norm without gain and bias: vectors of length sqrt(H), so that near is alike."""
    wide = x.astype(context.precision.norm)
    ones = jnp.ones(x.shape[-1:], wide.dtype)
    return layer_norm(wide, ones, None, LAYER_NORM_EPSILON).astype(x.dtype)


def centroid_weights(
    module: nn.Module,
    num_heads: int,  # N
    num_clusters: int,  # E
    head_dim: int,  # H
    context: ModelContext,
) -> jax.Array:  # [N, E, H]
    """Declares them. They start about as long as the vectors that they are to stand for."""
    outputs = {"heads": num_heads, "clusters": num_clusters, "head": head_dim}
    init, dtype = nn.initializers.normal(1.0), context.precision.parameters
    return declare_weight(module, "centroids", outputs=outputs, init=init, dtype=dtype)


def centroid_affinity(
    x: jax.Array,  # [B, T, N, H]
    centroids: jax.Array,  # [N, E, H]
) -> jax.Array:  # [B, N, T, E] float32
    """-|x - c|^2 / 2 for each centroid c: largest of the nearest. No gradient reaches x."""
    wide, centroids = (each.astype(jnp.float32) for each in (jax.lax.stop_gradient(x), centroids))
    products = jnp.einsum("BTNH,NEH->BNTE", wide, centroids)
    square = lambda each: jnp.sum(jnp.square(each), axis=-1)  # noqa: E731
    return (
        products - (square(wide).swapaxes(1, 2)[..., None] + square(centroids)[None, :, None]) / 2
    )


def kmeans_loss(
    affinities: Sequence[jax.Array],  # affinities [B, N, T, E]
    documents: jax.Array | None,  # [B or 1, T] 0 is padding; None: there is none
) -> jax.Array:  # a number
    """The mean over tokens and heads of the squared distance to the nearest centroid.

    What k-means minimises. Its gradient draws each centroid to the mean of its tokens.
    """
    squares = jnp.concatenate(
        [-2 * each.max(-1) for each in affinities]
    )  # [B, N, T] or [2 B, N, T]
    if documents is None:
        return jnp.mean(squares)
    shape = (len(affinities), len(affinities[0]), *documents.shape[1:])
    real = jnp.broadcast_to(documents != 0, shape).reshape(len(squares), 1, -1)
    return jnp.sum(squares * real) / jnp.maximum(jnp.sum(real) * squares.shape[1], 1)
