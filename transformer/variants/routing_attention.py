"""Routing attention: tokens meet within clusters that k-means finds (Roy et al. 2021).

Not to be confused with the routing of tokens to experts.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attend.sparse.balanced import attend_balanced, belongs, nearest
from transformer.attend.sparse.grouped_window import attend_grouped, places, within_documents
from transformer.attend.sparse.last_members import attend_last_members
from transformer.cache import KVCache
from transformer.documents import documents
from transformer.heads import Heads, join, key_heads, query_heads, value_heads
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.positions import Rotary, rotate
from transformer.refusals import refuse_memory, refuse_patterns, refuse_weights
from transformer.variants.clusters import affinity, centroids, distance, unit
from transformer.variants.configs import RoutingConfig as RoutingConfig
from transformer.variants.keys_seen import in_groups


class MembersCache(struct.PyTreeNode):
    """Keys and values of all tokens, and their clusters."""

    kv: KVCache
    clusters: jax.Array  # [B, S, N]

    def write(
        self,
        k: jax.Array,  # [B, T, N, H]
        v: jax.Array,  # [B, T, N, H]
        clusters: jax.Array,  # [B, T, N]
        positions: jax.Array,  # [B, T], consecutive within a row
    ) -> "MembersCache":
        """The cache with T more tokens, at the positions given."""
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        kept = jax.vmap(put)(self.clusters, clusters, positions[:, 0])
        return MembersCache(self.kv.write(k, v, positions), kept)


class ClusteredHeads(NamedTuple):
    """Queries, keys and values, and how near the tokens are to each centroid."""

    q: jax.Array  # [B, T, N, H]
    k: jax.Array  # [B, T, N, H]
    v: jax.Array  # [B, T, N, H]
    affinity: list[jax.Array]  # [B, N, T, E] of the queries; of balanced clusters, of the keys too


class RoutingAttention(Mixer):
    """Softmax attention within clusters."""

    config: RoutingConfig

    @staticmethod
    def abilities(config: RoutingConfig) -> Abilities:
        free = not config.balanced
        return Abilities(causal=free, cached=free, segments=free, cross=False, weights=False)

    @staticmethod
    def constants(config: RoutingConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: RoutingConfig, width: int, length: int) -> ScoreFlops:
        """Products with centroids, and with the members of a cluster, at most `window`."""
        each, vectors = (
            2 * config.heads * config.query_width(width) * config.clusters,
            1 + config.balanced,
        )
        if config.balanced:
            size = min(config.window, length)
            members = 2 * each * size * size // length
            return ScoreFlops(full=vectors * each + members, causal=vectors * each + members)
        found = in_groups(config.window, length).flops(config, width)
        return ScoreFlops(full=each + found.full, causal=each + found.causal)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> MembersCache:
        config, shared = self.config, self.shared
        if config.balanced:
            raise ValueError("mixer routing: decodes without balanced clusters alone; unset that")
        shape = (batch, length, config.heads, config.query_width(shared.width))
        zeros = jnp.zeros(shape, shared.precision.compute)
        return MembersCache(KVCache(zeros, zeros), jnp.zeros(shape[:3], jnp.int32))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        cache = inputs.cache
        config, shared = self.config, self.shared
        refuse_memory(config.kind, inputs.memory)
        refuse_weights(config.kind, inputs.outputs)
        refuse_patterns(config.kind, inputs.mask)
        self.refuse(inputs.mask, cache)
        q, k, v, near = self.project(x, inputs)
        heads, aux = Heads(q, k, v), {}
        if "losses" in inputs.outputs:
            far = distance(near, documents(inputs.mask, x.shape[1]))
            aux["loss/centroids"] = config.centroid_loss * far
        near = [jax.lax.stop_gradient(each) for each in near]
        if config.balanced:
            y = self.within_balanced(heads, near, inputs.mask)
        elif cache is None:
            y = self.within_own(heads, near[0], inputs.mask)
        else:
            at = jnp.broadcast_to(inputs.positions, x.shape[:2])
            y, cache = self.decoded(heads, near[0], cache, at)
        return MixerOutput(join(self, y, config, shared), cache, aux)

    def project(self, x: jax.Array, inputs: MixerInputs) -> ClusteredHeads:
        """Declare the projections and the centroids; clusters do not depend on positions."""
        config, shared = self.config, self.shared
        q = unit(query_heads(self, x, config, shared), shared)
        k = unit(key_heads(self, x, config, shared), shared) if config.balanced else q
        v = value_heads(self, x, config, shared)
        middle = centroids(self, config.heads, config.clusters, q.shape[-1], shared)
        near = [affinity(each, middle) for each in ((q, k) if config.balanced else (q,))]
        if isinstance(config.position, Rotary):
            q, k = (rotate(each, inputs.positions, config.position) for each in (q, k))
        return ClusteredHeads(q, k, v, near)

    @nn.nowrap
    def refuse(self, mask: Mask, cache: Any) -> None:
        """Raises ValueError for what the configuration cannot do."""
        causal = mask.pattern.causal
        if self.config.balanced and causal:
            raise ValueError(
                "mixer routing: balanced clusters see the whole row, so a causal mask is not "
                "obeyed; set balanced to False"
            )
        if self.config.balanced and mask.segments is not None and not mask.one_document:
            raise ValueError(
                "mixer routing: documents of a pack would take each other's places in balanced "
                "clusters; set balanced to False, or give padding by lengths or a Classifier's "
                "segments"
            )
        if cache is not None and not causal:
            raise ValueError("mixer routing: decodes under a causal mask alone; give one")

    @nn.nowrap
    def how(self, q: jax.Array) -> dict[str, Any]:
        return dict(scale=1 / math.sqrt(q.shape[-1]), softmax_dtype=self.shared.precision.softmax)

    @nn.nowrap
    def groups(self, near: jax.Array, mask: Mask) -> jax.Array:  # [B, N, T, E] -> [B, N, T]
        """The cluster of each token; of equally near ones the first. Documents have their own."""
        here = documents(mask, near.shape[2])
        return within_documents(jnp.argmax(near, axis=-1), self.config.clusters, here)

    @nn.nowrap
    def within_own(self, heads: Heads, near: jax.Array, mask: Mask) -> jax.Array:  # [B, T, N, H]
        groups, causal = self.groups(near, mask), mask.pattern.causal
        how = self.how(heads.q)
        return attend_grouped(*heads, groups, self.config.window, causal=causal, **how).y

    @nn.nowrap
    def decoded(
        self,
        heads: Heads,
        near: jax.Array,  # [B, N, T, E]
        cache: MembersCache,
        positions: jax.Array,  # [B, T]
    ) -> tuple[jax.Array, MembersCache]:  # [B, T, N, H]
        own = jnp.argmax(near, axis=-1).swapaxes(1, 2).astype(jnp.int32)
        cache = cache.write(heads.k, heads.v, own, positions)
        kept = cache.kv.keys, cache.kv.values, own, cache.clusters
        how = self.how(heads.q)
        return attend_last_members(heads.q, *kept, positions, self.config.window, **how), cache

    @nn.nowrap
    def within_balanced(
        self,
        heads: Heads,
        near: list[jax.Array],  # [B, N, T, E] of queries and of keys
        mask: Mask,
    ) -> jax.Array:  # [B, T, N, H]
        there = self.there(mask, heads.q.shape[1])
        of_queries, of_keys = self.members(near, there)
        dtype = self.shared.precision.softmax
        return attend_balanced(*heads, of_queries, of_keys, there, dtype)

    @nn.nowrap
    def members(self, near: list[jax.Array], there: jax.Array) -> list[jax.Array]:
        """Of each cluster the queries and the keys, [B, N, E, window] indices of tokens.

        Padding comes behind all others: it fills the places of rows shorter than `window`, where
        it is neither seen nor sees.
        """
        count = min(self.config.window, there.shape[1])
        return [nearest(jnp.where(there[:, None, :, None], each, -jnp.inf), count) for each in near]

    @nn.nowrap
    def there(self, mask: Mask, length: int) -> jax.Array:  # [B or 1, T] booleans
        """Which tokens are no padding."""
        here = documents(mask, length)
        return jnp.ones((1, length), bool) if here is None else here != 0

    @nn.nowrap
    def select(
        self,
        heads: ClusteredHeads,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B, N, T, T] booleans
        """Those of a query's cluster, or of all that it is in."""
        mask, near, length = inputs.mask, heads.affinity, heads.q.shape[1]
        if self.config.balanced:
            there = self.there(mask, length)
            queries, keys = (
                belongs(each, length) & there[:, None, None] for each in self.members(near, there)
            )
            return (queries[..., :, None] & keys[..., None, :]).any(2)
        where = places(self.groups(near[0], mask), self.config.window)
        return jnp.abs(where[..., :, None] - where[..., None, :]) < self.config.window


MIXERS[RoutingConfig.kind] = RoutingAttention
