"""Top-k attention: each query attends to its highest-scoring keys (Gupta et al. 2021)."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from transformer.attention.backends.partial import widen
from transformer.attention.backends.tiling import Tiling, pad_mask, tile_mask
from transformer.attention.cache import KVCache, MemoryCache
from transformer.attention.masks import Mask, dense_mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.attention.projections import (
    QKV,
    MultiHeadConfig,
    combine_heads,
    project_memory,
    project_qkv,
    project_queries,
)
from transformer.attention.reference import ScoreSpec, weighted_values
from transformer.attention.sparse_ops.query_blocks import (
    QUERY_BLOCK_SIZE,
    SAVED_QUERY_BLOCK_RESIDUALS,
    map_query_blocks,
    softmax_where,
)
from transformer.attention.sparse_ops.visible_key_counts import grouped_visible_keys
from transformer.layers.basic import dropout, fold_in
from transformer.layers.precise_einsum import accumulation_dtype
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import Fraction, PositiveInt


@dataclasses.dataclass(frozen=True)
class TopKConfig(MultiHeadConfig):
    """Softmax over the k highest scores of each query among the visible keys (Gupta et al. 2021).

    All scores are computed, one block of queries at a time: time O(T^2), memory O(T). Ties go to
    the key with the lower index.
    """

    kind: ClassVar[str] = "top_k"

    keys_per_query: PositiveInt = 64
    """k, keys that a query attends to. A query that sees fewer keys attends to all of them."""
    dropout: Fraction = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""


@register_mixer
class TopKAttention(Mixer):
    """Softmax over the k highest scores; exactly causal, since only visible keys compete."""

    config: TopKConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: TopKConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def score_flops(config: TopKConfig, width: int, length: int) -> ScoreFlops:
        """Count the scores of all keys and the values of the selected keys."""
        per_key = 2 * config.num_heads * config.resolved_head_dim(width)
        selected = grouped_visible_keys(config.keys_per_query, length).causal
        return ScoreFlops(
            full=per_key * (length + min(config.keys_per_query, length)),
            causal=per_key * (length + 1) // 2 + round(per_key * selected),
        )

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        return KVCache.empty(batch, length, *self.cache_sizes())

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryCache:
        return MemoryCache.empty(batch, length, *self.cache_sizes())

    @nn.nowrap
    def cache_sizes(self) -> tuple[int, int, str]:
        """Return K, H and the storage dtype of a cache."""
        head_dim = self.config.resolved_head_dim(self.context.d_model)
        return self.config.resolved_num_kv_heads, head_dim, self.context.precision.cache_dtype

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config = self.config
        mask, cache = inputs.mask, inputs.cache
        if inputs.memory is not None or isinstance(cache, MemoryCache):
            q = project_queries(self, x)
            k, v, cache = project_memory(self, inputs.memory, cache, q.dtype)
        else:
            q, k, v = self.project(x, inputs)
            if cache is not None:
                cache = cache.append(k, v, inputs.positions)
                k, v, key_positions = cache.read(q.dtype)
                mask = mask.with_keys(key_positions, keys_include_queries=True)
        score_spec = self.score_spec(q.shape[-1], fold_in(inputs.dropout_rngs, 0))
        if "weights" in inputs.outputs:
            weights = top_k_weights(q, k, mask, score_spec, config.keys_per_query)
            y = apply_top_k_weights(weights, v, score_spec)
            return combine_heads(self, y, inputs, cache, {"weights": weights})
        y = attend_top_k(q, k, v, mask, score_spec, config.keys_per_query)
        return combine_heads(self, y, inputs, cache)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(self, x, inputs.positions)

    @nn.nowrap
    def score_spec(self, head_dim: int, dropout_rngs: jax.Array | None = None) -> ScoreSpec:
        return ScoreSpec(
            scale=1 / math.sqrt(head_dim),
            softmax_dtype=self.context.precision.softmax,
            dropout_rate=self.config.dropout,
            dropout_rngs=dropout_rngs,
        )

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> Bool[Array, "B N T T"]:
        """Return the selected keys among those that the mask shows."""
        q, k, _ = heads
        score_spec = self.score_spec(q.shape[-1])
        scores = score_spec.compute_scores(q, k, inputs.positions, inputs.positions)
        visible = dense_mask(inputs.mask, q.shape[1], q.shape[1])[:, None]
        return top_k_mask(scores, visible, self.config.keys_per_query)


def attend_top_k(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask,
    score_spec: ScoreSpec,
    keys_per_query: int,
    *,
    block_size: int = QUERY_BLOCK_SIZE,
) -> Float[Array, "B T N Hv"]:
    """Attend from each query to its `keys_per_query` highest-scoring keys (section 2)."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    # A tile has all keys: the k highest scores of a query are known only from all of its scores.
    tiling = Tiling(
        num_queries, num_keys, min(block_size, num_queries), num_keys, lookback=None, lookahead=None
    )
    padded_mask, dtype = pad_mask(mask, tiling), v.dtype
    # All blocks of queries add to the gradients of the keys: widen first, so that the sum is
    # rounded once.
    score_spec, (q, k, v) = widen(score_spec, q, k, v)

    def attend_block(block_index: jax.Array, q: jax.Array) -> jax.Array:
        block_mask = tile_mask(padded_mask, tiling, block_index, 0)
        weights = top_k_weights(q, k, block_mask, score_spec, keys_per_query)
        # One traced block stands for all: without its index they would drop the same weights.
        dropout_rngs = fold_in(score_spec.dropout_rngs, block_index)
        return apply_top_k_weights(weights, v, score_spec._replace(dropout_rngs=dropout_rngs))

    return map_query_blocks(attend_block, (q,), block_size=block_size).astype(dtype)


def top_k_weights(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    mask: Mask,
    score_spec: ScoreSpec,
    keys_per_query: int,
) -> Float[Array, "B N T S"]:
    """Return softmax weights over the k highest visible scores, zero elsewhere."""
    scores = score_spec.compute_scores(q, k, *mask.resolved_positions(q.shape[1], k.shape[1]))
    selected = top_k_mask(scores, dense_mask(mask, q.shape[1], k.shape[1])[:, None], keys_per_query)
    return softmax_where(scores, selected)[0]


def apply_top_k_weights(
    weights: Float[Array, "B N T S"],
    v: Float[Array, "B S K Hv"],
    score_spec: ScoreSpec,
) -> Float[Array, "B T N Hv"]:
    """Apply dropout to the weights and return the weighted sum of the values."""
    operand_dtype = score_spec.operand_dtype_of(v)
    sum_dtype = accumulation_dtype(operand_dtype, score_spec.softmax_dtype)
    dropped = dropout(weights, score_spec.dropout_rate, score_spec.dropout_rngs).astype(sum_dtype)
    return weighted_values(dropped, v, operand_dtype, sum_dtype).astype(v.dtype)


def top_k_mask(
    scores: Float[Array, "B N T S"],
    visible: Bool[Array, "#B 1 T S"],
    keys_per_query: int,
) -> Bool[Array, "B N T S"]:
    """Return a mask of the k highest visible scores per query. Ties go to the lower index."""
    # Which keys are chosen has no gradient; the softmax over the chosen ones has.
    scores = jnp.where(visible, jax.lax.stop_gradient(scores), -jnp.inf)
    # One number a row that costs 32 passes over the scores: the backward pass reads it.
    threshold = checkpoint_name(
        nth_largest(scores, min(keys_per_query, scores.shape[-1])), SAVED_QUERY_BLOCK_RESIDUALS
    )
    # Fill the remaining places with ties, lowest index first.
    above, equal = scores > threshold, scores == threshold
    num_ties = keys_per_query - above.sum(-1, keepdims=True)
    # `visible`, because with fewer than k visible keys the threshold is -inf, and hidden keys tie.
    return visible & (above | (equal & (jnp.cumsum(equal, axis=-1) <= num_ties)))


def nth_largest(
    x: Float[Array, "... S"],
    n: int,  # from 1 to S
) -> Float[Array, "... 1"]:
    """Return the n-th largest entry of each row, exactly and without sorting. No entry is NaN.

    Build its bits from the highest to the lowest: a bit is set if at least n entries are as large
    as the number with it. This takes 32 comparisons per entry. `jax.lax.top_k` may be faster for
    small n, but XLA does not partition it: each device would gather the scores of all.
    """
    # Float32 holds every 16-bit float exactly, so one width will do.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    sign_bit = jnp.uint32(1 << 31)
    # Map floats to unsigned integers in the same order: set the sign bit of positive numbers, flip
    # all bits of negative ones.
    ordered = jnp.where(bits >= sign_bit, ~bits, bits | sign_bit)

    def try_bit(step: jax.Array, result: jax.Array) -> jax.Array:
        candidate = result | (sign_bit >> jnp.uint32(step))
        is_reached = jnp.sum(ordered >= candidate, axis=-1, keepdims=True) >= n
        return jnp.where(is_reached, candidate, result)

    result = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros_like(ordered[..., :1]))
    # The inverse of the map above.
    float_bits = jnp.where(result >= sign_bit, result ^ sign_bit, ~result)
    return jax.lax.bitcast_convert_type(float_bits, jnp.float32).astype(x.dtype)
