"""Routing attention: softmax attention within k-means clusters (Roy et al. 2021).

Centroids are weights, trained by an auxiliary k-means loss. Not related to the routing of tokens to
experts.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.cache import KVCache
from transformer.attention.document_boundaries import token_segments
from transformer.attention.masks import Mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
    reject_memory,
    reject_weights,
)
from transformer.attention.projections import (
    QKV,
    combine_heads,
    project_keys,
    project_queries,
    project_values,
)
from transformer.attention.rope import RoPE, apply_rope
from transformer.attention.sparse_ops.balanced_clusters import (
    attend_balanced_clusters,
    membership_mask,
    nearest_tokens,
)
from transformer.attention.sparse_ops.grouped_window import (
    attend_grouped,
    group_positions,
    split_groups_by_document,
)
from transformer.attention.sparse_ops.top_k_keys import attend_last_group_members
from transformer.attention.sparse_ops.visible_key_counts import grouped_visible_keys
from transformer.attention.variants.sparse_configs import RoutingAttentionConfig
from transformer.layers.basic import declare_weight
from transformer.layers.norms import layer_norm
from transformer.model_context import ModelContext
from transformer.taps import HEAD_OUTPUTS

LAYER_NORM_EPSILON = 1e-5


def layer_norm_without_affine(
    x: jax.Array, context: ModelContext
) -> jax.Array:  # [B, T, N, H] -> [B, T, N, H]
    """Normalize to length sqrt(H), so that the nearest centroid has the largest dot product."""
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
    """Declare the centroids, initialized to about the length of normalized vectors."""
    outputs = {"heads": num_heads, "clusters": num_clusters, "head": head_dim}
    init, dtype = nn.initializers.normal(1.0), context.precision.parameters
    return declare_weight(module, "centroids", outputs=outputs, init=init, dtype=dtype)


def centroid_affinity(
    x: jax.Array,  # [B, T, N, H]
    centroids: jax.Array,  # [N, E, H]
) -> jax.Array:  # [B, N, T, E] float32
    """Return -|x - c|^2 / 2 for each centroid c. No gradient reaches x."""
    wide, centroids = (each.astype(jnp.float32) for each in (jax.lax.stop_gradient(x), centroids))
    # |x - c|^2 = |x|^2 - 2 x . c + |c|^2: one matmul, and no array [B, T, N, E, H] of differences.
    products = jnp.einsum("BTNH,NEH->BNTE", wide, centroids)
    square = lambda each: jnp.sum(jnp.square(each), axis=-1)  # noqa: E731
    return (
        products - (square(wide).swapaxes(1, 2)[..., None] + square(centroids)[None, :, None]) / 2
    )


def kmeans_loss(
    affinities: Sequence[jax.Array],  # affinities [B, N, T, E]
    documents: jax.Array | None,  # [B or 1, T] 0 is padding; None: there is none
) -> jax.Array:  # a number
    """Return the mean squared distance of tokens to their nearest centroid, over heads and tokens.

    This is the k-means objective. Its gradient pulls each centroid to the mean of its tokens.
    """
    # The affinity is -|x - c|^2 / 2, so its maximum over E gives the nearest centroid's distance.
    squares = jnp.concatenate(
        [-2 * each.max(-1) for each in affinities]
    )  # [B, N, T] or [2 B, N, T]
    if documents is None:
        return jnp.mean(squares)
    shape = (len(affinities), len(affinities[0]), *documents.shape[1:])
    # With balanced clusters, keys come after queries along the batch: each has the same documents.
    real = jnp.broadcast_to(documents != 0, shape).reshape(len(squares), 1, -1)
    return jnp.sum(squares * real) / jnp.maximum(jnp.sum(real) * squares.shape[1], 1)


class ClusterCache(struct.PyTreeNode):
    """Keys, values and clusters of all tokens."""

    kv: KVCache
    clusters: jax.Array  # [B, S, N]

    @classmethod
    def empty(
        cls, batch_size: int, length: int, num_heads: int, head_dim: int, dtype: str
    ) -> "ClusterCache":
        """Return a cache with room for `length` tokens of each example."""
        kv = KVCache.empty(batch_size, length, num_heads, head_dim, dtype)
        return cls(kv, jnp.zeros((batch_size, length, num_heads), jnp.int32))

    def append(
        self,
        k: jax.Array,  # [B, T, N, H]
        v: jax.Array,  # [B, T, N, H]
        clusters: jax.Array,  # [B, T, N]
        positions: jax.Array,  # [B, T], consecutive within a row
    ) -> "ClusterCache":
        """Return the cache with T more tokens at the given positions."""
        # Rows are at different positions, so each writes its tokens at an offset of its own.
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        new_clusters = jax.vmap(put)(self.clusters, clusters, positions[:, 0])
        return ClusterCache(self.kv.append(k, v, positions), new_clusters)

    def read(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return keys and values [B, S, N, H] in `dtype`, and clusters [B, S, N]."""
        k, v, _ = self.kv.read(dtype)
        return k, v, self.clusters


class ClusteredHeads(NamedTuple):
    """Queries, keys and values, and their affinities to the centroids."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, T, N, H]
    v: jax.Array  # [B, T, N, H]
    centroid_affinity: list[
        jax.Array
    ]  # [B, N, T, E] of the queries; of balanced clusters, of the keys too


@register_mixer
class RoutingAttention(Mixer):
    """Softmax attention within clusters."""

    config: RoutingAttentionConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: RoutingAttentionConfig) -> Abilities:
        free = not config.balanced
        return Abilities(causal=free, cached=free, segments=free, cross=False, weights=False)

    @staticmethod
    def constants(config: RoutingAttentionConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: RoutingAttentionConfig, width: int, length: int) -> ScoreFlops:
        """Count products with centroids and with at most `window` members of a cluster."""
        each, vectors = (
            2 * config.num_heads * config.resolved_head_dim(width) * config.num_clusters,
            1 + config.balanced,
        )
        if config.balanced:
            size = min(config.window, length)
            members = 2 * each * size * size // length
            return ScoreFlops(full=vectors * each + members, causal=vectors * each + members)
        flops = grouped_visible_keys(config.window, length).flops(config, width)
        return ScoreFlops(full=each + flops.full, causal=each + flops.causal)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> ClusterCache:
        config, context = self.config, self.context
        if config.balanced:
            raise ValueError(
                "mixer routing: cannot decode with balanced clusters; set balanced to False"
            )
        head_dim = config.resolved_head_dim(context.d_model)
        dtype = context.precision.cache_dtype
        return ClusterCache.empty(batch, length, config.num_heads, head_dim, dtype)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, cache = self.config, inputs.cache
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        self.check_inputs(inputs.mask, cache)
        q, k, v, near = self.project(x, inputs)
        heads, aux = QKV(q, k, v), {}
        if "losses" in inputs.outputs:
            distance = kmeans_loss(near, token_segments(inputs.mask, x.shape[1]))
            aux["loss/centroids"] = config.centroid_loss_weight * distance
        # Assignment to clusters has no gradient: centroids learn from the k-means loss alone.
        near = [jax.lax.stop_gradient(each) for each in near]
        if config.balanced:
            y = self.attend_balanced(heads, near, inputs.mask)
        elif cache is None:
            y = self.attend_clusters(heads, near[0], inputs.mask)
        else:
            at = jnp.broadcast_to(inputs.positions, x.shape[:2])
            y, cache = self.attend_cached(heads, near[0], cache, at)
        return combine_heads(self, y, inputs, cache, aux)

    def project(self, x: jax.Array, inputs: MixerInputs) -> ClusteredHeads:
        """Declare the projections and the centroids; clusters do not depend on positions."""
        config, context = self.config, self.context
        q = layer_norm_without_affine(project_queries(self, x, config, context), context)
        # Queries serve as keys unless clusters are balanced: each token then has one cluster, and a
        # query always sees its own key.
        k = (
            layer_norm_without_affine(project_keys(self, x, config, context), context)
            if config.balanced
            else q
        )
        v = project_values(self, x, config, context)
        middle = centroid_weights(self, config.num_heads, config.num_clusters, q.shape[-1], context)
        near = [centroid_affinity(each, middle) for each in ((q, k) if config.balanced else (q,))]
        # After the affinities: a rotated vector would change its cluster with its position.
        if isinstance(config.position, RoPE):
            q, k = (apply_rope(each, inputs.positions, config.position) for each in (q, k))
        return ClusteredHeads(q, k, v, near)

    @nn.nowrap
    def check_inputs(self, mask: Mask, cache: Any) -> None:
        """Raise ValueError for inputs that the configuration does not support."""
        causal = mask.pattern.causal
        if self.config.balanced and causal:
            raise ValueError(
                "mixer routing: balanced clusters depend on the whole row, so a causal mask is "
                "not supported; set balanced to False"
            )
        if self.config.balanced and mask.segments is not None and not mask.single_document:
            raise ValueError(
                "mixer routing: packed documents would compete for places in balanced clusters; "
                "set balanced to False, or give padding by lengths or a Classifier's segments"
            )
        if cache is not None and not causal:
            raise ValueError("mixer routing: decoding with a cache needs a causal mask; give one")

    @nn.nowrap
    def softmax_options(self, q: jax.Array) -> dict[str, Any]:
        return dict(scale=1 / math.sqrt(q.shape[-1]), softmax_dtype=self.context.precision.softmax)

    @nn.nowrap
    def cluster_ids(self, near: jax.Array, mask: Mask) -> jax.Array:  # [B, N, T, E] -> [B, N, T]
        """Return the cluster of each token, separate per document. Ties go to the lower index."""
        here = token_segments(mask, near.shape[2])
        return split_groups_by_document(jnp.argmax(near, axis=-1), self.config.num_clusters, here)

    @nn.nowrap
    def attend_clusters(self, heads: QKV, near: jax.Array, mask: Mask) -> jax.Array:  # [B, T, N, H]
        groups, causal = self.cluster_ids(near, mask), mask.pattern.causal
        options = self.softmax_options(heads.q)
        return attend_grouped(*heads, groups, self.config.window, causal=causal, **options).y

    @nn.nowrap
    def attend_cached(
        self,
        heads: QKV,
        near: jax.Array,  # [B, N, T, E]
        cache: ClusterCache,
        positions: jax.Array,  # [B, T]
    ) -> tuple[jax.Array, ClusterCache]:  # [B, T, N, H]
        # Clusters are cached as numbers: centroids are constant while decoding.
        own = jnp.argmax(near, axis=-1).swapaxes(1, 2).astype(jnp.int32)
        cache = cache.append(heads.k, heads.v, own, positions)
        k, v, clusters = cache.read(heads.q.dtype)
        options = self.softmax_options(heads.q)
        y = attend_last_group_members(
            heads.q, k, v, own, clusters, positions, self.config.window, **options
        )
        return y, cache

    @nn.nowrap
    def attend_balanced(
        self,
        heads: QKV,
        near: list[jax.Array],  # [B, N, T, E] of queries and of keys
        mask: Mask,
    ) -> jax.Array:  # [B, T, N, H]
        is_token = self.is_token(mask, heads.q.shape[1])
        of_queries, of_keys = self.cluster_members(near, is_token)
        dtype = self.context.precision.softmax
        return attend_balanced_clusters(*heads, of_queries, of_keys, is_token, dtype)

    @nn.nowrap
    def cluster_members(self, near: list[jax.Array], is_token: jax.Array) -> list[jax.Array]:
        """Return the queries and the keys of each cluster, [B, N, E, window] indices of tokens.

        Padding comes last. It fills clusters of rows shorter than `window` and is masked there.
        """
        # Clusters of equal size have static shapes: each takes its `window` nearest tokens, so a
        # token may be in several of them or in none.
        count = min(self.config.window, is_token.shape[1])
        return [
            nearest_tokens(jnp.where(is_token[:, None, :, None], each, -jnp.inf), count)
            for each in near
        ]

    @nn.nowrap
    def is_token(self, mask: Mask, length: int) -> jax.Array:  # [B or 1, T] booleans
        """Return which tokens are not padding."""
        here = token_segments(mask, length)
        return jnp.ones((1, length), bool) if here is None else here != 0

    @nn.nowrap
    def select(
        self,
        heads: ClusteredHeads,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B, N, T, T] booleans
        """Return the keys of the query's cluster; balanced: of all clusters that contain it."""
        mask, near, length = inputs.mask, heads.centroid_affinity, heads.q.shape[1]
        if self.config.balanced:
            is_token = self.is_token(mask, length)
            queries, keys = (
                membership_mask(each, length) & is_token[:, None, None]
                for each in self.cluster_members(near, is_token)
            )
            return (queries[..., :, None] & keys[..., None, :]).any(2)
        # The same windows as `attend_grouped`, as differences of numbers (see `group_positions`).
        where = group_positions(self.cluster_ids(near[0], mask), self.config.window)
        return jnp.abs(where[..., :, None] - where[..., None, :]) < self.config.window
