"""Longformer: sliding window and global tokens (Beltagy et al. 2020).

Window and global keys share one softmax, computed as two partial results that are merged. Global
tokens attend to all tokens by projections of their own, and these results replace their rows.
Decoding keeps the tokens of a window, and the global tokens twice: under the ordinary and under the
global projections.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from transformer.attention.backends.blockwise import DEFAULT_BLOCK_SIZE, attend_blockwise
from transformer.attention.backends.partial import PartialAttention, merge_partials, widen
from transformer.attention.cache import (
    RollingCache,
    mark_padding,
    prepend_cached_keys,
    scatter_tokens,
)
from transformer.attention.masks import Mask, MaskPattern
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
    QKV,
    MultiHeadConfig,
    combine_heads,
    project_qkv,
    project_queries,
)
from transformer.attention.reference import ScoreSpec
from transformer.attention.rope import RoPE
from transformer.attention.sparse_ops.global_tokens import (
    attend_from_document_globals,
    attend_from_tokens,
    attend_to_document_globals,
    attend_to_tokens,
    find_document_globals,
    gather_tokens,
    list_tokens,
    mask_duplicates,
)
from transformer.attention.sparse_ops.mask_tokens import query_and_key_tokens
from transformer.attention.sparse_ops.strided_rows import attend_strided_rows
from transformer.attention.sparse_ops.visible_key_counts import MeanVisibleKeys
from transformer.layers.basic import declare_linear, fold_in
from transformer.layers.low_rank import merge_weight
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import (
    Fraction,
    NonNegativeInt,
)


@dataclasses.dataclass(frozen=True)
class LongformerConfig(MultiHeadConfig):
    """Sliding window and global tokens (Beltagy et al. 2020, section 3.1).

    Every token attends to its window and to the global tokens. Global tokens attend to all tokens
    through projections of their own: `query_global`, `key_global` and `value_global`.
    """

    kind: ClassVar[str] = "longformer"

    one_sided_window: NonNegativeInt = 256
    """Keys on each side of the query, w / 2 in the paper. Under a causal mask: keys before it."""
    dilations: tuple[int, ...] = (1,)
    """Distance between neighboring keys of the window: one for each head, or one for all heads."""
    num_global_tokens: NonNegativeInt = 1
    """Global tokens at the start of each document, such as [CLS]. A mask with `global_positions`
    overrides it."""
    dropout: Fraction = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""

    @property
    def receptive_field(self) -> int:
        """Number of consecutive positions from the query to its most distant key, inclusive.

        A cache must hold this many tokens.
        """
        # The head that looks furthest decides: all heads share one cache.
        return self.one_sided_window * max(self.dilations) + 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.dilations) not in (1, self.num_heads) or min(self.dilations) < 1:
            raise ValueError(
                f"LongformerConfig.dilations {self.dilations}: give one number from 1 on, or one "
                f"for each of {self.num_heads} heads"
            )


class GlobalTokenCache(struct.PyTreeNode):
    """Keys and values of the first n tokens; slot p holds position p."""

    keys: Float[Array, "B n K H"]
    values: Float[Array, "B n K H"]

    @classmethod
    def empty(
        cls, batch_size: int, num_tokens: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> "GlobalTokenCache":
        """Return a cache with room for the first n tokens."""
        zeros = jnp.zeros((batch_size, num_tokens, num_kv_heads, head_dim), dtype)
        return cls(zeros, zeros)

    def read(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Return keys and values in `dtype`."""
        return self.keys.astype(dtype), self.values.astype(dtype)

    def append(
        self,
        keys: Float[Array, "B T K H"],
        values: Float[Array, "B T K H"],
        positions: Int[Array, "B T"],  # negative for padding
    ) -> "GlobalTokenCache":
        """Add those of T new tokens that are among the first n."""
        slots = jnp.where(positions < 0, self.keys.shape[1], positions)  # beyond: nowhere
        return GlobalTokenCache(
            scatter_tokens(self.keys, keys.astype(self.keys.dtype), slots),
            scatter_tokens(self.values, values.astype(self.values.dtype), slots),
        )


class LongformerCache(struct.PyTreeNode):
    """Cache of constant size: a window and the global tokens."""

    window: RollingCache
    """Tokens within the window of the next query."""
    global_kv: GlobalTokenCache
    """Global tokens under the ordinary projections, as seen by other tokens."""
    global_query_kv: GlobalTokenCache
    """Global tokens under the global projections, as seen by global queries."""


@register_mixer
class Longformer(Mixer):
    """One softmax over window and global keys; global queries attend to all keys."""

    config: LongformerConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: LongformerConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def score_flops(config: LongformerConfig, width: int, length: int) -> ScoreFlops:
        return longformer_visible_keys(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LongformerCache:
        """Return a cache for the receptive field and the global tokens; independent of `length`."""
        config = self.config
        heads = config.resolved_num_kv_heads, config.resolved_head_dim(self.context.d_model)
        dtype = self.context.precision.cache_dtype
        num_global = min(config.num_global_tokens, length)
        global_tokens = GlobalTokenCache.empty(batch, num_global, *heads, dtype)
        window = RollingCache.empty(batch, min(config.receptive_field, length), *heads, dtype)
        return LongformerCache(window, global_tokens, global_tokens)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        reject_mask_patterns(config.kind, inputs.mask.replace(global_positions=None))
        qkv = project_qkv(self, x, inputs.positions)
        score_spec = ScoreSpec(
            scale=1 / math.sqrt(qkv.q.shape[-1]),
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=inputs.dropout_rngs,
        )
        if inputs.cache is None:
            y, cache = self.attend_row(x, inputs, qkv, score_spec), None
        else:
            y, cache = self.attend_cached(x, inputs, qkv, score_spec)
        return combine_heads(self, y, inputs, cache)

    def attend_row(
        self,
        x: Float[Array, "B T D"],
        inputs: MixerInputs,
        qkv: QKV,
        score_spec: ScoreSpec,
    ) -> Float[Array, "B T N H"]:
        """Attend within rows of one or several documents, without a cache."""
        mask, positions, length = inputs.mask, inputs.positions, x.shape[1]
        if mask.positions is None:
            mask = mask.replace(positions=positions)
        queries, keys = query_and_key_tokens(mask, length, length)
        global_positions = jnp.arange(self.config.num_global_tokens)[None, :]
        if mask.global_positions is not None:
            global_positions = mask_duplicates(jnp.asarray(mask.global_positions))
        num_global = global_positions.shape[1]
        is_global = (keys.positions[:, :, None] == global_positions[:, None, :]).any(-1)
        is_global &= keys.segments != 0
        may_be_packed = mask.segments is not None and not mask.single_document
        mask = Mask(
            mask.pattern,
            positions=queries.positions,
            segments=queries.segments,
            key_segments=keys.segments,
        )
        # Wide, so that two parts are merged, and their gradients added, before rounding.
        wide_spec, (q, k, v) = widen(score_spec, *qkv)
        window = self.attend_window(q, k, v, mask, keys.segments, is_global, wide_spec)
        if not num_global:
            if self.is_initializing():  # another mask may list some
                project_qkv(self, x, positions, suffix="_global")
            return window.y.astype(qkv.v.dtype)
        key_spec = fold_in_part(wide_spec, GLOBAL_KEYS)
        query_spec = fold_in_part(score_spec, GLOBAL_QUERIES)

        def attend_by_list(mixer: Longformer) -> jax.Array:
            index = list_tokens(is_global, num_global)
            global_keys = attend_to_tokens(q, k, v, mask, key_spec, index)
            y = merge_partials([window, global_keys]).y.astype(qkv.v.dtype)
            rows = mixer.attend_from_globals(x, positions, mask, query_spec, index)
            return scatter_tokens(y, rows, index)

        def attend_by_document(mixer: Longformer) -> jax.Array:
            index = find_document_globals(keys, global_positions)
            global_keys = attend_to_document_globals(q, k, v, mask, key_spec, index)
            y = merge_partials([window, global_keys]).y.astype(qkv.v.dtype)
            qkv_global = project_qkv(mixer, x, positions, suffix="_global")
            rows = attend_from_document_globals(*qkv_global, mask, query_spec, index)
            return jnp.where(is_global[:, :, None, None], rows, y)

        if not may_be_packed:
            return attend_by_list(self)
        # Rows that may be packed seldom are, and a list is much cheaper: its queries are few, so
        # not all tokens are projected. Not chosen at run time under a causal mask, where a later
        # document would change the rounding of earlier ones, nor with dropout, which must depend
        # on the key of the example alone.
        drops = score_spec.dropout_rate > 0 and score_spec.dropout_rngs is not None
        if self.is_initializing() or mask.pattern.causal or drops:
            return attend_by_document(self)
        # What a branch keeps for its gradient takes room though the other one runs: of documents,
        # projections of every token, which are made again instead.
        y: jax.Array = nn.cond(
            is_global.sum(1).max() <= num_global,
            attend_by_list,
            nn.remat(attend_by_document),
            self,
        )
        return y

    def attend_cached(
        self,
        x: Float[Array, "B T D"],
        inputs: MixerInputs,
        qkv: QKV,
        score_spec: ScoreSpec,
    ) -> tuple[Float[Array, "B T N H"], LongformerCache]:
        """Attend from new tokens to cached ones. The global tokens are the first tokens.

        Raises:
          ValueError: the mask is not causal, or lists global tokens of its own.
        """
        pattern = inputs.mask.pattern
        if not pattern.causal:
            raise ValueError(
                "mixer longformer: decoding with a cache needs a causal mask; give one"
            )
        if inputs.mask.global_positions is not None:
            raise ValueError(
                "mixer longformer: in decoding, the global tokens are the first ones; give a "
                "mask without global positions, and set longformer.num_global_tokens"
            )
        cache: LongformerCache = inputs.cache
        positions = mark_padding(inputs.positions, x.shape[0])
        num_global = cache.global_kv.keys.shape[1]
        window = self.attend_cached_window(qkv, inputs.mask, positions, cache, score_spec)
        cache = cache.replace(
            window=cache.window.append(qkv.k, qkv.v, positions),
            global_kv=cache.global_kv.append(qkv.k, qkv.v, positions),
        )
        if not num_global:
            return window.y.astype(qkv.v.dtype), cache
        mask = Mask(pattern, positions=positions).with_keys(jnp.arange(num_global)[None, :])
        wide_spec, wide = widen(score_spec, qkv.q, *cache.global_kv.read(qkv.q.dtype))
        global_keys = attend_blockwise(*wide, mask, fold_in_part(wide_spec, GLOBAL_KEYS))
        y = merge_partials([window, global_keys]).y.astype(qkv.v.dtype)
        is_global = (positions >= 0) & (positions < num_global)

        def replace_global_rows(mixer: Longformer) -> tuple[jax.Array, GlobalTokenCache]:
            q, k, v = project_qkv(mixer, x, inputs.positions, suffix="_global")
            global_query_kv = cache.global_query_kv.append(k, v, positions)
            query_spec = fold_in_part(score_spec, GLOBAL_QUERIES)
            rows = attend_blockwise(q, *global_query_kv.read(q.dtype), mask, query_spec).y
            return jnp.where(is_global[:, :, None, None], rows, y), global_query_kv

        if self.is_initializing():
            y, global_query_kv = replace_global_rows(self)
        else:  # new tokens are rarely global: skip the global projections at run time
            keep = lambda mixer: (y, cache.global_query_kv)  # noqa: E731
            y, global_query_kv = nn.cond(is_global.any(), replace_global_rows, keep, self)
        return y, cache.replace(global_query_kv=global_query_kv)

    @nn.nowrap
    def attend_cached_window(
        self,
        qkv: QKV,
        mask: Mask,
        positions: Int[Array, "B T"],
        cache: LongformerCache,
        score_spec: ScoreSpec,
    ) -> PartialAttention:
        """Attend to the keys of the window that are not global, cached and new ones."""
        q, k, v, mask, key_positions, num_padding = prepend_cached_keys(
            cache.window, *qkv, mask, positions
        )
        if mask.segments is None:
            mask = mask.replace(segments=jnp.ones_like(positions))
            key_segments = jnp.ones_like(key_positions)
        else:
            key_segments = mask.segments
        is_global = (key_positions >= 0) & (key_positions < cache.global_kv.keys.shape[1])
        wide_spec, wide = widen(score_spec, q, k.astype(q.dtype), v.astype(q.dtype))
        y, lse = self.attend_window(*wide, mask, key_segments, is_global, wide_spec)
        return PartialAttention(y[:, num_padding:], lse[:, :, num_padding:])

    @nn.nowrap
    def attend_window(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        mask: Mask,  # with segments
        key_segments: Int[Array, "#B S"],
        is_global: Bool[Array, "#B S"],
        score_spec: ScoreSpec,
    ) -> PartialAttention:
        """Attend to the keys of the window that are not global."""
        # Global keys are in the other part of the softmax: counted here too, they would weigh
        # twice.
        mask = mask.replace(key_segments=jnp.where(is_global, 0, key_segments))
        return attend_dilated(
            q,
            k,
            v,
            mask,
            fold_in_part(score_spec, WINDOW),
            self.config.one_sided_window,
            self.config.dilations,
            self.context.hardware.tile_size,
        )

    def attend_from_globals(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "#B T"],
        mask: Mask,
        score_spec: ScoreSpec,
        index: Int[Array, "#B n"],  # T: none
    ) -> Float[Array, "B n N H"]:
        """Attend from the global tokens to all tokens, by projections of their own.

        For few queries it is cheaper not to project all T tokens:
        q . (W x) = (q W) . x, and a mean of W x is W times the mean of x.
        The key bias adds a constant to all scores of a query, which the softmax ignores. A norm,
        a rotation or a clip of the keys between projection and score rules that out.
        """
        config, context = self.config, self.context
        head_dim = config.resolved_head_dim(context.d_model)
        axes = {"kv_heads": config.resolved_num_kv_heads, "head": head_dim}
        is_few = 2 * index.shape[1] * config.num_heads <= axes["kv_heads"] * axes["head"]
        is_linear = (
            config.qk_norm is None and not config.qkv_clip and not isinstance(config.position, RoPE)
        )
        if not (is_few and is_linear):
            q, k, v = project_qkv(self, x, positions, suffix="_global")
            return attend_from_tokens(gather_tokens(q, index), k, v, mask, score_spec, index)
        rows = gather_tokens(x, jnp.broadcast_to(index, (x.shape[0], index.shape[1])))
        q = project_queries(self, rows, suffix="_global")
        embed, group_size = {"embed": context.d_model}, config.num_heads // axes["kv_heads"]
        # The key bias is declared although nothing reads it, so that the weights are those of an
        # ordinary projection.
        key, _ = declare_linear(self, "key_global", embed, axes, context, bias=config.bias)
        value, bias = declare_linear(self, "value_global", embed, axes, context, bias=config.bias)
        # Matrices with a low-rank update are merged: a query would have to go through both factors.
        key, value = (jnp.repeat(merge_weight(w), group_size, axis=1) for w in (key, value))
        # A value entry of 1 returns the sum of the weights, the factor of the value bias: dropout
        # leaves it different from 1.
        ones = jnp.ones((*x.shape[:2], 1), x.dtype)
        mean = attend_from_tokens(
            jnp.einsum("BTNH,DNH->BTND", q, key),
            x[:, :, None],  # the tokens themselves are the keys, of one head of width D
            jnp.concatenate([x, ones], axis=-1)[:, :, None],
            mask,
            score_spec,
            index,
        )
        y = jnp.einsum("BTND,DNH->BTNH", mean[..., :-1], value)
        if bias is not None:
            y = y + mean[..., -1:] * jnp.repeat(bias, group_size, axis=0)[None, None]
        return y


WINDOW, GLOBAL_KEYS, GLOBAL_QUERIES = range(3)
"""Parts of the attention. Each drops weights by random keys of its own."""


def fold_in_part(score_spec: ScoreSpec, part: int) -> ScoreSpec:
    """Return the scores of one part of the attention."""
    return score_spec._replace(dropout_rngs=fold_in(score_spec.dropout_rngs, part))


MIN_TILE_SIZE = 64


def attend_dilated(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask,  # causal or not; with positions, segments and key_segments
    score_spec: ScoreSpec,
    one_sided_window: int,  # keys on each side, beside the query's own
    dilations: Sequence[int],  # of each head, or one for all
    max_tile_size: int = DEFAULT_BLOCK_SIZE,  # the most queries, and keys, that are scored at once
) -> PartialAttention:
    """Attend to keys 0, d, 2 d, ..., window * d positions away (causal: to those before).

    Positions must count up by one within a document. Cost O(T window) for any dilation. Keys with
    `key_positions` of their own, such as cached keys, may be in any order at a cost of O(T S).
    """
    # Keys less than `window + 1` positions away: the query's own, and `window` on a side.
    pattern = MaskPattern(causal=mask.pattern.causal, window=one_sided_window + 1)
    # Tiles as wide as the window compute two or three for each block of queries. Much smaller
    # ones would spend their time in the loop and not in products.
    block_size = min(max(one_sided_window, MIN_TILE_SIZE), max_tile_size)

    def attend_with(
        dilation: int, q: jax.Array, k: jax.Array, v: jax.Array, score_spec: ScoreSpec
    ) -> PartialAttention:
        # Cached keys: order and gaps are unknown, so only positions decide (no tile is skipped).
        if mask.key_positions is not None:
            unordered = dataclasses.replace(pattern, dilation=dilation, ordered=False)
            return attend_blockwise(q, k, v, mask.replace(pattern=unordered), score_spec)
        # Among every d-th token, positions are d apart: integer division makes them consecutive.
        positions, _ = mask.resolved_positions(q.shape[1], k.shape[1])
        row_mask = mask.replace(pattern=pattern, positions=positions // dilation)
        return attend_strided_rows(q, k, v, row_mask, score_spec, dilation, block_size)

    if len(set(dilations)) == 1:
        return attend_with(dilations[0], q, k, v, score_spec)
    # One call for each dilation, since a call has one row layout for all of its heads. Query heads
    # that share a key head may differ in dilation, so key heads are repeated.
    head_dilations, group_size = np.array(dilations), q.shape[2] // k.shape[2]
    partials, head_order = [], []
    for dilation in sorted(set(dilations)):
        heads = np.flatnonzero(head_dilations == dilation)
        kv_heads = heads // group_size
        # Another key for each call: with the same one, all would drop the same weights.
        spec = score_spec._replace(dropout_rngs=fold_in(score_spec.dropout_rngs, dilation))
        partials.append(
            attend_with(dilation, q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads], spec)
        )
        head_order += list(heads)
    # In NumPy: dilations are static, so the order of the heads is a constant of the program.
    inverse_order = np.argsort(head_order)
    y = jnp.concatenate([part.y for part in partials], axis=2)[:, :, inverse_order]
    lse = jnp.concatenate([part.lse for part in partials], axis=1)[:, inverse_order]
    return PartialAttention(y, lse)


def longformer_visible_keys(config: LongformerConfig, length: int) -> MeanVisibleKeys:
    """Average over window and global keys of one document; global queries see all keys."""
    index, num_global = np.arange(length), min(config.num_global_tokens, length)
    behind, ahead = np.zeros(length), np.zeros(length)
    for dilation in config.dilations:
        reach = config.one_sided_window * dilation
        behind += np.minimum(index, reach) // dilation
        ahead += np.minimum(length - 1 - index, reach) // dilation
        for position in range(num_global):
            distance = np.abs(index - position)
            behind += (distance > reach) | (distance % dilation != 0)
    behind, ahead = behind / len(config.dilations), ahead / len(config.dilations)
    behind[:num_global], ahead[:num_global] = index[:num_global], length - 1 - index[:num_global]
    return MeanVisibleKeys(float((behind + ahead).mean()) + 1, float(behind.mean()) + 1)
