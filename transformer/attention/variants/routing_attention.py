"""Routing attention: softmax attention within k-means clusters (Roy et al. 2021).

Centroids are weights, trained by an auxiliary k-means loss. Not related to the routing of tokens to
experts.

Letters: E clusters, C tokens of a balanced cluster.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from transformer.attention.cache import KVCache
from transformer.attention.document_boundaries import token_segments
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
)
from transformer.attention.projections import (
    SharedQueryKeyConfig,
    combine_heads,
    project_keys,
    project_queries,
    project_values,
)
from transformer.attention.reference import dot_product_scores, weighted_values
from transformer.attention.rope import RoPE, apply_rope
from transformer.attention.sparse_ops.grouped_window import (
    attend_grouped,
    group_positions,
    split_groups_by_document,
)
from transformer.attention.sparse_ops.query_blocks import map_query_blocks, softmax_where
from transformer.attention.sparse_ops.visible_key_counts import grouped_visible_keys
from transformer.layers.basic import declare_weight
from transformer.layers.norms import layer_norm
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum
from transformer.model_context import ModelContext
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import NonNegativeFloat, PositiveInt

LAYER_NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class RoutingAttentionConfig(SharedQueryKeyConfig):
    """Attention within k-means clusters of queries and keys (Roy et al. 2021, section 4.1).

    Differences from the paper:
    - The paper gives each cluster its nearest tokens of the whole row, under a causal mask too. A
      later token can then displace an earlier one, which leaks the future. Here, unless
      `balanced`, each token joins its nearest centroid and a query sees the last members of its
      cluster, which depend on the past only.
    - The paper updates centroids by moving averages. Here an auxiliary loss trains them.
    - The paper gives half of the heads a local window. Here, alternate with layers of
      `sliding_window`.
    """

    kind: ClassVar[str] = "routing"

    num_clusters: PositiveInt = 16
    """E, clusters per head. The paper recommends about sqrt(T)."""
    window: PositiveInt = 256
    """Members of its cluster that a query sees, including itself: the last ones under a causal
    mask, otherwise also the window - 1 after it. With `balanced`: the size of a cluster."""
    balanced: bool = False
    """Give each cluster its `window` nearest queries and keys (algorithm 1). Not under a causal
    mask. Keys get a projection of their own. A query in several clusters attends to the keys of
    all of them in one softmax; a query in none gets zeros. Padding joins no cluster. Packed
    documents would displace each other's tokens, so segments are rejected unless each row is known
    to hold one document, as in a classifier."""
    centroid_loss_weight: NonNegativeFloat = 0.01
    """Weight of the loss that pulls each centroid to the mean of its tokens. Centroids get no other
    gradient, and tokens get none from this loss."""

    @property
    def ignores_padding(self) -> bool:
        return self.balanced


class ClusterCache(struct.PyTreeNode):
    """Keys, values and clusters of all tokens."""

    kv: KVCache
    clusters: Int[Array, "B S N"]

    @classmethod
    def empty(
        cls, batch_size: int, length: int, num_heads: int, head_dim: int, dtype: str
    ) -> "ClusterCache":
        """Return a cache with room for `length` tokens of each example."""
        kv = KVCache.empty(batch_size, length, num_heads, head_dim, dtype)
        return cls(kv, jnp.zeros((batch_size, length, num_heads), jnp.int32))

    def append(
        self,
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        clusters: Int[Array, "B T N"],
        positions: Int[Array, "B T"],  # consecutive within a row
    ) -> "ClusterCache":
        """Return the cache with T more tokens at the given positions."""
        # Rows are at different positions, so each writes its tokens at an offset of its own.
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        written = jax.vmap(write)(self.clusters, clusters, positions[:, 0])
        return ClusterCache(self.kv.append(k, v, positions), written)

    def read(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return keys and values [B, S, N, H] in `dtype`, and clusters [B, S, N]."""
        k, v, _ = self.kv.read(dtype)
        return k, v, self.clusters


class ClusteredHeads(NamedTuple):
    """Queries, keys and values, and their affinities to the centroids."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T N H"]
    v: Float[Array, "B T N H"]
    affinities: jax.Array  # [1 or 2, B, N, T, E] of queries; with balanced clusters, of keys too


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
    def score_flops(config: RoutingAttentionConfig, width: int, length: int) -> ScoreFlops:
        """Count products with centroids and with at most `window` members of a cluster."""
        centroids = 2 * config.num_heads * config.resolved_head_dim(width) * config.num_clusters
        if config.balanced:
            size = min(config.window, length)
            flops = 2 * centroids + 2 * centroids * size * size // length
            return ScoreFlops(full=flops, causal=flops)
        members = grouped_visible_keys(config.window, length).flops(config, width)
        return ScoreFlops(full=centroids + members.full, causal=centroids + members.causal)

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
        config, mask, cache = self.config, inputs.mask, inputs.cache
        reject_mask_patterns(config.kind, mask)
        if config.balanced and mask.pattern.causal:
            raise ValueError(
                "mixer routing: balanced clusters depend on the whole row, so a causal mask is "
                "not supported; set balanced to False"
            )
        if cache is not None and not mask.pattern.causal:
            raise ValueError("mixer routing: decoding with a cache needs a causal mask; give one")
        q, k, v, affinities = self.project(x, inputs)
        documents, aux = token_segments(mask, x.shape[1]), {}
        if "losses" in inputs.outputs:
            loss = kmeans_loss(affinities, documents)
            aux["loss/centroids"] = config.centroid_loss_weight * loss
        # Which cluster a token joins has no gradient: centroids learn from the loss alone.
        scale, softmax_dtype = 1 / math.sqrt(q.shape[-1]), self.context.precision.softmax
        if config.balanced:
            query_members, key_members = cluster_members(config, affinities, documents)
            y = attend_balanced_clusters(q, k, v, query_members, key_members, softmax_dtype)
        elif cache is None:
            y = attend_grouped(
                q,
                k,
                v,
                cluster_ids(config, affinities, documents),
                config.window,
                causal=mask.pattern.causal,
                scale=scale,
                softmax_dtype=softmax_dtype,
            ).y
        else:
            positions = jnp.broadcast_to(inputs.positions, x.shape[:2])
            # Clusters are cached as numbers: centroids are constant while decoding.
            clusters = jnp.argmax(affinities[0], axis=-1).swapaxes(1, 2).astype(jnp.int32)
            cache = cache.append(k, v, clusters, positions)
            k, v, key_clusters = cache.read(q.dtype)
            y = attend_last_group_members(
                q,
                k,
                v,
                clusters,
                key_clusters,
                positions,
                config.window,
                scale=scale,
                softmax_dtype=softmax_dtype,
            )
        return combine_heads(self, y, inputs, cache, aux)

    def project(self, x: jax.Array, inputs: MixerInputs) -> ClusteredHeads:
        """Declare the projections and the centroids; clusters do not depend on positions."""
        config, context = self.config, self.context
        q = layer_norm_without_affine(project_queries(self, x), context)
        k = q
        if config.balanced:
            k = layer_norm_without_affine(project_keys(self, x), context)
        v = project_values(self, x)
        centroids = declare_weight(
            self,
            "centroids",
            outputs={
                "heads": config.num_heads,
                "clusters": config.num_clusters,
                "head": q.shape[-1],
            },
            init=nn.initializers.normal(1.0),  # about the length of normalized vectors
            dtype=context.precision.parameters,
        )
        clustered = (q, k) if config.balanced else (q,)
        affinities = jnp.stack([centroid_affinity(vectors, centroids) for vectors in clustered])
        # After the affinities: a rotated vector would change its cluster with its position.
        if isinstance(config.position, RoPE):
            q = apply_rope(q, inputs.positions, config.position)
            k = apply_rope(k, inputs.positions, config.position)
        return ClusteredHeads(q, k, v, affinities)

    @nn.nowrap
    def select(
        self,
        heads: ClusteredHeads,
        inputs: MixerInputs,
    ) -> Bool[Array, "B N T T"]:
        """Return the keys of the query's cluster; balanced: of all clusters that contain it."""
        config, length = self.config, heads.q.shape[1]
        documents = token_segments(inputs.mask, length)
        if config.balanced:
            query_members, key_members = cluster_members(config, heads.affinities, documents)
            queries = membership_mask(query_members, length)
            keys = membership_mask(key_members, length)
            return (queries[..., :, None] & keys[..., None, :]).any(2)
        # The same windows as `attend_grouped`, as differences of numbers (see `group_positions`).
        numbers = group_positions(cluster_ids(config, heads.affinities, documents), config.window)
        return jnp.abs(numbers[..., :, None] - numbers[..., None, :]) < config.window


def layer_norm_without_affine(
    x: Float[Array, "B T N H"], context: ModelContext
) -> Float[Array, "B T N H"]:
    """Normalize to length sqrt(H), so that the nearest centroid has the largest dot product."""
    wide = x.astype(context.precision.norm)
    ones = jnp.ones(x.shape[-1:], wide.dtype)
    return layer_norm(wide, ones, None, LAYER_NORM_EPSILON).astype(x.dtype)


def centroid_affinity(
    x: Float[Array, "B T N H"],
    centroids: Float[Array, "N E H"],
) -> Float32[Array, "B N T E"]:
    """Return -|x - c|^2 / 2 for each centroid c. No gradient reaches x."""
    x, centroids = jax.lax.stop_gradient(x).astype(jnp.float32), centroids.astype(jnp.float32)
    # |x - c|^2 = |x|^2 - 2 x . c + |c|^2: one matmul, and no array [B, T, N, E, H] of differences.
    products = jnp.einsum("BTNH,NEH->BNTE", x, centroids)
    x_squares = jnp.sum(jnp.square(x), axis=-1).swapaxes(1, 2)[..., None]
    centroid_squares = jnp.sum(jnp.square(centroids), axis=-1)[None, :, None]
    return products - (x_squares + centroid_squares) / 2


def kmeans_loss(
    affinities: jax.Array,  # [1 or 2, B, N, T, E]
    documents: Int[Array, "#B T"] | None,  # 0 is padding; None: there is none
) -> Float[Array, ""]:
    """Return the mean squared distance of tokens to their nearest centroid, over heads and tokens.

    This is the k-means objective. Its gradient pulls each centroid to the mean of its tokens.
    """
    # The affinity is -|x - c|^2 / 2, so its maximum over E gives the nearest centroid's distance.
    squares = -2 * affinities.max(-1)  # [1 or 2, B, N, T]
    if documents is None:
        return jnp.mean(squares)
    is_token = jnp.broadcast_to((documents != 0)[None, :, None], squares.shape)
    return jnp.sum(squares * is_token) / jnp.maximum(jnp.sum(is_token), 1)


def cluster_ids(
    config: RoutingAttentionConfig,
    affinities: Float[Array, "1 B N T E"],
    documents: Int[Array, "#B T"] | None,  # 0 is padding; None: one document
) -> Int[Array, "B N T"]:
    """Return the nearest cluster of each token, separate per document. Ties go to the lower."""
    nearest = jnp.argmax(affinities[0], axis=-1)
    return split_groups_by_document(nearest, config.num_clusters, documents)


def attend_last_group_members(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],  # in row s the key at position s
    v: Float[Array, "B S N Hv"],
    groups: Int[Array, "B T N"],  # of the queries
    key_groups: Int[Array, "B S N"],
    positions: Int[Array, "B T"],  # of the queries; -1: sees nothing
    window: int,
    *,
    scale: float,
    softmax_dtype: str = "float32",
) -> Float[Array, "B T N Hv"]:
    """Compute causal `attend_grouped` for new queries over cached keys."""
    key_groups = jnp.swapaxes(key_groups, 1, 2)[:, :, None]  # [B, N, 1, S]
    key_positions = jnp.arange(k.shape[1])[None, None, None, :]
    operand_dtype, sum_dtype = q.dtype, accumulation_dtype(q.dtype, softmax_dtype)

    def attend_block(
        block_index: jax.Array,
        q: Float[Array, "B R N H"],
        groups: Int[Array, "B R N"],
        positions: Int[Array, "B R"],
    ) -> Float[Array, "B R N Hv"]:
        same_group = jnp.swapaxes(groups, 1, 2)[..., None] == key_groups
        earlier = same_group & (key_positions <= positions[:, None, :, None])
        # The last `window` members are those with fewer than `window` members after them.
        member_count = jnp.cumsum(earlier, axis=-1)
        in_window = earlier & (member_count[..., -1:] - member_count < window)
        # All cached keys are scored and most are hidden: the places of the members in the cache
        # depend on the data, and gathering them would need a sort.
        scores = dot_product_scores(q, k, operand_dtype, sum_dtype).astype(softmax_dtype) * scale
        weights = softmax_where(scores, in_window)[0].astype(sum_dtype)
        return weighted_values(weights, v, operand_dtype, sum_dtype).astype(v.dtype)

    return map_query_blocks(attend_block, (q, groups, positions))


def cluster_members(
    config: RoutingAttentionConfig,
    affinities: Float[Array, "2 B N T E"],  # of queries and of keys
    documents: Int[Array, "#B T"] | None,  # 0 is padding; None: there is none
) -> Int[Array, "2 B N E C"]:  # indices of tokens; T: no token
    """Return the tokens nearest to each cluster (algorithm 1). Ties go to the lower index.

    Each cluster picks its tokens, not each token its cluster: sizes are equal and shapes static,
    and a token may be in several clusters or in none.
    """
    affinities, length = affinities.swapaxes(-1, -2), affinities.shape[-2]
    if documents is not None:
        affinities = jnp.where((documents != 0)[None, :, None, None], affinities, -jnp.inf)
    nearest, members = jax.lax.top_k(affinities, min(config.window, length))
    # A row with fewer than C tokens fills its clusters with padding, which an index out of range
    # drops: gathered as zeros, not added to any token.
    return jnp.where(nearest > -jnp.inf, members, length)


def membership_mask(
    members: Int[Array, "B N E C"],
    length: int,
) -> Bool[Array, "B N E T"]:
    """Return a mask of the tokens that each cluster contains."""
    empty = jnp.zeros((*members.shape[:3], length), bool)
    return jnp.put_along_axis(empty, members, True, axis=-1, inplace=False, mode="drop")


def attend_balanced_clusters(
    q: Float[Array, "B T N H"],  # of length sqrt(H), as are keys
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N Hv"],
    query_members: Int[Array, "B N E C"],
    key_members: Int[Array, "B N E C"],
    softmax_dtype: str = "float32",
) -> Float[Array, "B T N Hv"]:
    """Compute a softmax over the keys of all clusters that contain the query.

    A key that shares m clusters with the query counts 1 / m in each of them. Queries in no cluster
    get zeros. Scores lie in [-sqrt(H), sqrt(H)] because q and k have length sqrt(H). The constant
    sqrt(H) is therefore subtracted in place of the row maximum, on which the clusters of a query
    would have to agree.
    """
    bound, length = math.sqrt(q.shape[-1]), q.shape[1]
    operand_dtype, sum_dtype, dtype = q.dtype, accumulation_dtype(q.dtype, softmax_dtype), v.dtype
    # A token may be in several clusters, and their gradients are added: widen first, so that the
    # sum is rounded once.
    q, k, v = (x.astype(sum_dtype).swapaxes(1, 2) for x in (q, k, v))  # [B, N, T, H]
    q, k, v = _gather(q, query_members), _gather(k, key_members), _gather(v, key_members)
    scores = precise_einsum("BNECH,BNEDH->BNECD", q, k, operand_dtype, sum_dtype)
    scores = scores.astype(softmax_dtype) / bound
    # The clusters F that contain both the query and the key, counted by a matrix product: far below
    # 2^24, to which float32 counts exactly.
    query_clusters, key_clusters = (
        _gather(membership_mask(members, length).swapaxes(2, 3).astype(jnp.float32), members)
        for members in (query_members, key_members)
    )
    shared = jnp.einsum("BNECF,BNEDF->BNECD", query_clusters, key_clusters).astype(softmax_dtype)
    exp_scores = jnp.where(shared > 0, jnp.exp(scores - bound) / jnp.maximum(shared, 1), 0)
    total = _sum_over_clusters(exp_scores.sum(-1, keepdims=True), query_members, length)
    has_keys = total > 0
    # Divide the weights by their sum before the matmul with the values. If divided after it, the
    # gradients through numerator and denominator would not cancel, because the matmul rounds one.
    total = _gather(jnp.where(has_keys, total, 1), query_members, fill_value=1)
    weights = (exp_scores / total).astype(sum_dtype)
    y = precise_einsum("BNECD,BNEDH->BNECH", weights, v, operand_dtype, sum_dtype)
    y = jnp.where(has_keys, _sum_over_clusters(y, query_members, length), 0)
    return y.astype(dtype).swapaxes(1, 2)


def _gather(
    x: Shaped[Array, "B N T F"], members: Int[Array, "B N E C"], fill_value: float = 0
) -> Shaped[Array, "B N E C F"]:
    """Return the tokens of each cluster."""
    flat = members.reshape(*members.shape[:2], -1, 1)
    gathered = jnp.take_along_axis(x, flat, axis=2, mode="fill", fill_value=fill_value)
    return gathered.reshape(*members.shape, x.shape[-1])


def _sum_over_clusters(x: jax.Array, members: jax.Array, length: int) -> jax.Array:
    """Sum the results of all clusters for each token: [B, N, E, C, H] -> [B, N, T, H]."""
    flat = members.reshape(*members.shape[:2], -1)

    def add(rows: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.zeros((length, rows.shape[-1]), rows.dtype).at[tokens].add(rows, mode="drop")

    return jax.vmap(jax.vmap(add))(x.reshape(*flat.shape, -1), flat)
