"""Longformer: sliding window and global tokens (Beltagy et al. 2020).

Window and global keys share one softmax, computed as two partial results that are merged. Global
queries attend to all keys by projections of their own. Decoding keeps the tokens of a window, and
the global tokens twice: under the ordinary and under the global projections.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.tiling import PartialAttention, merge_partials, widen
from transformer.attention.cache import (
    RollingCache,
    mark_padding,
    prepend_cached_keys,
    scatter_tokens,
)
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
    project_qkv,
    project_queries,
)
from transformer.attention.reference import ScoreSpec
from transformer.attention.rope import RoPE
from transformer.attention.sparse_ops.global_tokens import (
    as_single_document,
    attend_from_packed_globals,
    attend_from_tokens,
    attend_to_globals,
    attend_to_packed_globals,
    attend_with_absorbed_projections,
    find_global_tokens,
    gather_tokens,
    has_single_document_rows,
    is_global_token,
    mask_duplicates,
)
from transformer.attention.sparse_ops.local_window import attend_dilated
from transformer.attention.sparse_ops.visible_key_counts import longformer_visible_keys
from transformer.attention.variants.sparse_configs import LongformerConfig
from transformer.layers.basic import fold_in
from transformer.taps import HEAD_OUTPUTS


class GlobalTokenCache(struct.PyTreeNode):
    """Keys and values of the first n tokens; slot p holds position p."""

    keys: jax.Array  # [B, n, K, H]
    values: jax.Array  # [B, n, K, H]

    @classmethod
    def empty(
        cls, batch_size: int, num_tokens: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> "GlobalTokenCache":
        """Return a cache with room for the first n tokens."""
        zeros = jnp.zeros((batch_size, num_tokens, num_kv_heads, head_dim), dtype)
        return cls(zeros, zeros)

    def read(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Return keys and values in `dtype`."""
        return self.keys.astype(dtype), self.values.astype(dtype)

    def append(
        self,
        keys: jax.Array,  # [B, T, K, H]
        values: jax.Array,  # [B, T, K, H]
        positions: jax.Array,  # [B, T], negative for padding
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

    @classmethod
    def empty(
        cls,
        batch: int,
        window_length: int,  # R
        num_global_tokens: int,  # n, global tokens
        num_kv_heads: int,  # K
        head_dim: int,  # H
        dtype: str,
    ) -> "LongformerCache":
        """Return an empty cache for R window tokens and n global tokens."""
        heads = num_kv_heads, head_dim, dtype
        global_tokens = GlobalTokenCache.empty(batch, num_global_tokens, *heads)
        window = RollingCache.empty(batch, window_length, *heads)
        return cls(window, global_tokens, global_tokens)


def attend_cached(
    mixer: Mixer,  # Longformer, whose projections it reads
    x: jax.Array,  # [B, T, D]
    positions: jax.Array,  # [B or 1, T]; -1: padding
    own: QKV,
    mask: Mask,  # causal
    scoring: ScoreSpec,
    cache: LongformerCache,
) -> tuple[jax.Array, LongformerCache]:  # [B, T, N, H]
    """Attend from new tokens to cached ones. The global tokens are the first tokens.

    Raises:
      ValueError: the mask is not causal, or lists global tokens of its own.
    """
    if not mask.pattern.causal:
        raise ValueError("mixer longformer: decoding with a cache needs a causal mask; give one")
    if mask.global_positions is not None:
        raise ValueError(
            "mixer longformer: in decoding, the global tokens are the first ones; give a "
            "mask without global positions, and set longformer.num_global_tokens"
        )
    here = mark_padding(positions, x.shape[0])
    first = cache.global_kv.keys.shape[1]
    scoring = scoring._replace(operand_dtype=own.q.dtype.name)
    near = _near(mixer, own, mask, scoring, cache.window, here, first)
    ring, global_kv = (
        cache.window.append(own.k, own.v, here),
        cache.global_kv.append(own.k, own.v, here),
    )
    if not first:
        return near.y.astype(own.v.dtype), cache.replace(window=ring, global_kv=global_kv)
    far, last = (
        scoring._replace(dropout_rngs=fold_in(scoring.dropout_rngs, part)) for part in (1, 2)
    )
    mask = Mask(mask.pattern, positions=here).with_keys(jnp.arange(first)[None, :])
    far, wide = widen(far, own.q, *global_kv.read(own.q.dtype))
    # Three caches: the window's ring, the global tokens' keys for all queries, and their keys by
    # the global projections. None grows with the length.
    y = merge_partials([near, attend_blockwise(*wide, mask, far)]).y.astype(own.v.dtype)
    are_global = (here >= 0) & (here < first)

    def rows(mixer: Mixer) -> tuple[jax.Array, GlobalTokenCache]:
        global_qkv = project_qkv(
            mixer,
            x,
            positions,
            mixer.config,
            mixer.context,
            position=mixer.config.position,
            suffix="_global",
        )
        seeing = cache.global_query_kv.append(global_qkv.k, global_qkv.v, here)
        global_y = attend_blockwise(global_qkv.q, *seeing.read(global_qkv.q.dtype), mask, last).y
        return jnp.where(are_global[:, :, None, None], global_y, y), seeing

    if mixer.is_initializing():
        y, seeing = rows(mixer)
    else:  # new tokens are rarely global: skip the global projections at run time
        y, seeing = nn.cond(are_global.any(), rows, lambda mixer: (y, cache.global_query_kv), mixer)
    return y, LongformerCache(ring, global_kv, seeing)


def _near(
    mixer: Mixer,
    own: QKV,
    mask: Mask,
    scoring: ScoreSpec,
    ring: RollingCache,
    here: jax.Array,  # [B, T]
    first: int,
) -> PartialAttention:
    """Attend to the keys of the window, without global keys."""
    config: LongformerConfig = mixer.config
    q, k, v, mask, places, before = prepend_cached_keys(ring, *own, mask, here)
    k, v = k.astype(q.dtype), v.astype(q.dtype)  # from the storage dtype of the cache
    is_token = jnp.ones_like(places) if mask.segments is None else mask.segments
    # Global keys are in the other part of the softmax: counted here too, they would weigh twice.
    hidden = (places >= 0) & (places < first)
    mask = mask.replace(
        segments=jnp.ones_like(here) if mask.segments is None else mask.segments,
        key_segments=jnp.where(hidden, 0, is_token),
    )
    again = scoring._replace(dropout_rngs=fold_in(scoring.dropout_rngs, 0))
    sizes = config.one_sided_window, config.dilations, mixer.context.hardware.tile_size
    # Unrounded until the two parts are merged.
    again, (q, k, v) = widen(again, q, k, v)
    attended = attend_dilated(q, k, v, mask, again, *sizes)
    return PartialAttention(attended.y[:, before:], attended.lse[:, :, before:])


class _Given(NamedTuple):
    """Inputs shared by the single-document and the packed implementation."""

    x: jax.Array  # [B, T, D]
    positions: jax.Array  # [B or 1, T]
    own: QKV
    near: PartialAttention  # in the window
    mask: Mask  # with positions, segments and key_segments [B or 1, T]
    listed: jax.Array  # [B or 1, n] positions of global tokens; -1: none
    far: ScoreSpec  # of global keys
    last: ScoreSpec  # of global queries


@register_mixer
class Longformer(Mixer):
    """One softmax over window and global keys; global queries attend to all keys."""

    config: LongformerConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: LongformerConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: LongformerConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: LongformerConfig, width: int, length: int) -> ScoreFlops:
        return longformer_visible_keys(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LongformerCache:
        """Return a cache for the receptive field and the global tokens; independent of `length`."""
        config, context = self.config, self.context
        first, reach = min(config.num_global_tokens, length), min(config.receptive_field, length)
        heads = config.resolved_num_kv_heads, config.resolved_head_dim(context.d_model)
        return LongformerCache.empty(batch, reach, first, *heads, context.precision.cache_dtype)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        mask, cache = inputs.mask, inputs.cache
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, mask.replace(global_positions=None))
        own = project_qkv(self, x, inputs.positions, config, context, position=config.position)
        scoring = ScoreSpec(
            scale=1 / math.sqrt(own.q.shape[-1]),
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=inputs.dropout_rngs,
        )
        if cache is not None:
            y, cache = attend_cached(self, x, inputs.positions, own, mask, scoring, cache)
            return combine_heads(self, y, inputs, cache)
        mask, listed, packed = self.prepare_mask(mask, inputs.positions)
        scoring, wide = widen(scoring, *own)  # to merge two parts, and add up their gradients
        own = QKV(*wide)
        near = self.attend_window(own, mask, scoring, listed)
        # No global tokens: the number is static, so this is decided while tracing.
        if not listed.shape[1]:
            if self.is_initializing():  # another mask may list some
                project_qkv(
                    self,
                    x,
                    inputs.positions,
                    config,
                    context,
                    position=config.position,
                    suffix="_global",
                )
            y = near.y.astype(context.precision.compute)
            return combine_heads(self, y, inputs)
        far, last = (
            scoring._replace(dropout_rngs=fold_in(inputs.dropout_rngs, part)) for part in (1, 2)
        )
        arguments = _Given(x, inputs.positions, own, near, mask, listed, far, last)
        if not packed:
            y = self.attend_single_document(arguments)
        elif self.is_initializing() or not _may_choose(mask, scoring):
            y = self.attend_packed(arguments)
        else:  # Flax's `cond`, as both branches read weights of the module
            # What a branch keeps for its gradient takes room though the other one runs: of packs,
            # projections of every token, which are made again instead.
            y = nn.cond(
                has_single_document_rows(mask),
                lambda module: module.attend_single_document(
                    arguments._replace(mask=as_single_document(mask))
                ),
                nn.remat(lambda module: module.attend_packed(arguments)),
                self,
            )
        return combine_heads(self, y, inputs)

    def attend_single_document(self, arguments: _Given) -> jax.Array:  # [B, T, N, H]
        """Merge window and global attention, and replace the rows of global queries."""
        x, positions, own, near, mask, listed, far, last = arguments
        # One document: the global tokens are the same for all queries of a row, and gathered once.
        index = find_global_tokens(mask, listed)
        y = merge_partials([near, attend_to_globals(*own, mask, far, index)]).y
        last = last._replace(operand_dtype="")  # of other projections, which are not wide
        y = y.astype(self.context.precision.compute)
        return scatter_tokens(y, self.attend_from_globals(x, positions, mask, last, index), index)

    def attend_packed(self, arguments: _Given) -> jax.Array:  # [B, T, N, H]
        """Do the same for rows with any number of documents."""
        x, positions, own, near, mask, listed, far, last = arguments
        y = merge_partials([near, attend_to_packed_globals(*own, mask, far, listed)]).y
        last = last._replace(operand_dtype="")  # of other projections, which are not wide
        y = y.astype(self.context.precision.compute)
        global_qkv = project_qkv(
            self,
            x,
            positions,
            self.config,
            self.context,
            position=self.config.position,
            suffix="_global",
        )
        return attend_from_packed_globals(y, *global_qkv, mask, last, listed)

    @nn.nowrap
    def prepare_mask(
        self, mask: Mask, positions: jax.Array
    ) -> tuple[Mask, jax.Array, bool]:  # [B or 1, n] positions of global tokens
        """Return the filled-in mask, the global positions, and True if rows may be packed."""
        length = positions.shape[1]
        first = jnp.arange(self.config.num_global_tokens)[None, :]
        listed = (
            first
            if mask.global_positions is None
            else mask_duplicates(jnp.asarray(mask.global_positions))
        )
        ones = jnp.ones((1, length), jnp.int32)
        real = token_segments(mask, length)
        filled = mask.replace(
            positions=jnp.asarray(positions if mask.positions is None else mask.positions),
            segments=ones if mask.segments is None else mask.segments,
            key_segments=ones if real is None else real,
            key_lengths=None,
            global_positions=None,
        )
        if mask.single_document:
            return as_single_document(filled), listed, False
        return filled, listed, mask.segments is not None

    @nn.nowrap
    def attend_window(
        self, heads: QKV, mask: Mask, scoring: ScoreSpec, global_positions: jax.Array
    ) -> PartialAttention:
        """Attend to the keys of the window, without global keys."""
        config = self.config
        segments: Any = mask.key_segments
        # Global keys are in the other part of the softmax: counted here too, they would weigh
        # twice.
        hidden = is_global_token(mask, global_positions)
        mask = mask.replace(key_segments=jnp.where(hidden, 0, segments))
        again = scoring._replace(dropout_rngs=fold_in(scoring.dropout_rngs, 0))
        sizes = config.one_sided_window, config.dilations, self.context.hardware.tile_size
        return attend_dilated(*heads, mask, again, *sizes)

    def attend_from_globals(
        self,
        x: jax.Array,  # [B, T, D]
        positions: jax.Array,  # [B or 1, T]
        mask: Mask,
        scoring: ScoreSpec,
        index: jax.Array,  # [B or 1, n]
    ) -> jax.Array:  # [B, n, N, H]
        """Attend from the global tokens to all tokens, by projections of their own."""
        config, context = self.config, self.context
        rows = gather_tokens(x, jnp.broadcast_to(index, (x.shape[0], index.shape[1])))
        projected = config.resolved_num_kv_heads * config.resolved_head_dim(context.d_model)
        # For few queries it is cheaper to project them by the key matrix than to project all T
        # keys. A norm or a rotation between projection and score rules that out.
        few = 2 * index.shape[1] * config.num_heads <= projected
        if few and config.qk_norm is None and not isinstance(config.position, RoPE):
            q = project_queries(self, rows, config, context, suffix="_global")

            def look(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                return attend_from_tokens(q, k, v, mask, scoring, index)

            return attend_with_absorbed_projections(self, q, x, look, config, context, "_global")
        heads = project_qkv(
            self, x, positions, config, context, position=config.position, suffix="_global"
        )
        q = gather_tokens(heads.q, index)
        return attend_from_tokens(q, heads.k, heads.v, mask, scoring, index)


def _may_choose(mask: Mask, scoring: ScoreSpec) -> bool:
    """Return True if the cheaper branch may be selected at run time for rows of one document.

    Not under a causal mask: a later document would change the rounding of earlier ones. Not with
    dropout: the branches drop different weights, and dropout must depend on the example's key
    alone, not on the rest of the batch.
    """
    drops = scoring.dropout_rate > 0 and scoring.dropout_rngs is not None
    return not mask.pattern.causal and not drops
