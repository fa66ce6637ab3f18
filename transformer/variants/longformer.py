"""Longformer: a window for every token, and a few global tokens (Beltagy et al. 2020)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attend import PartialAttention, ScoreSpec, merge_partials
from transformer.attend.sparse.dilated import attend_dilated
from transformer.attend.sparse.global_tokens import (
    as_single_document,
    attend_to_globals,
    find_global_tokens,
    has_single_document_rows,
    is_global_token,
    mask_duplicates,
)
from transformer.attend.sparse.packed_globals import (
    attend_from_packed_globals,
    attend_to_packed_globals,
)
from transformer.attend.sparse.rows import attend_from_tokens, gather_tokens, scatter_tokens
from transformer.documents import token_segments
from transformer.dropout import fold_in
from transformer.heads import (
    QKV,
    attend_with_absorbed_projections,
    project_output,
    project_qkv,
    project_queries,
)
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.positions import RoPE
from transformer.refusals import reject_mask_patterns, reject_memory, reject_weights
from transformer.variants.configs import LongformerConfig
from transformer.variants.keys_seen import longformer_visible_keys
from transformer.variants.longformer_decoding import LongformerCache, attend_cached

__all__ = ["Longformer", "LongformerConfig"]


class _Given(NamedTuple):
    """What both ways of looking at global tokens, and from them, start with."""

    x: jax.Array  # [B, T, D]
    positions: jax.Array  # [B or 1, T]
    own: QKV
    near: PartialAttention  # in the window
    mask: Mask  # with positions, segments and key_segments [B or 1, T]
    listed: jax.Array  # [B or 1, n] positions of global tokens; -1: none
    far: ScoreSpec  # of global keys
    last: ScoreSpec  # of global queries


class Longformer(Mixer):
    """One softmax over window and global keys; of global queries, over all keys."""

    config: LongformerConfig

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
        """Of a window's reach and the global tokens, however many tokens will come."""
        config, shared = self.config, self.context
        first, reach = min(config.num_global_tokens, length), min(config.receptive_field, length)
        heads = config.resolved_num_kv_heads, config.resolved_head_dim(shared.d_model)
        return LongformerCache.empty(batch, reach, first, *heads, shared.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        mask, cache = inputs.mask, inputs.cache
        config, shared = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, mask.replace(globals=None))
        own = project_qkv(self, x, inputs.positions, config, shared)
        scoring = ScoreSpec(
            scale=1 / math.sqrt(own.q.shape[-1]),
            softmax_dtype=shared.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=inputs.dropout_rngs,
        )
        if cache is not None:
            y, cache = attend_cached(self, x, inputs.positions, own, mask, scoring, cache)
            return MixerOutput(project_output(self, y, config, shared), cache, {})
        mask, listed, packed = self.prepare_mask(mask, inputs.positions)
        scoring, wide = scoring.widen(*own)  # to merge two parts, and add up their gradients
        own = QKV(*wide)
        near = self.attend_window(own, mask, scoring, listed)
        if not listed.shape[1]:
            if self.is_initializing():  # another mask may list some
                project_qkv(self, x, inputs.positions, config, shared, "_global")
            y = near.y.astype(shared.precision.compute)
            return MixerOutput(project_output(self, y, config, shared), None, {})
        far, last = (
            scoring._replace(dropout_rngs=fold_in(inputs.dropout_rngs, part)) for part in (1, 2)
        )
        given = _Given(x, inputs.positions, own, near, mask, listed, far, last)
        if not packed:
            y = self.attend_single_document(given)
        elif self.is_initializing() or not _may_choose(mask, scoring):
            y = self.attend_packed(given)
        else:  # Flax's `cond`, as both branches read weights of the module
            # What a branch keeps for its gradient takes room though the other one runs: of packs,
            # projections of every token, which are made again instead.
            y = nn.cond(
                has_single_document_rows(mask),
                lambda module: module.attend_single_document(
                    given._replace(mask=as_single_document(mask))
                ),
                nn.remat(lambda module: module.attend_packed(given)),
                self,
            )
        return MixerOutput(project_output(self, y, config, shared), None, {})

    def attend_single_document(self, given: _Given) -> jax.Array:  # [B, T, N, H]
        """Window and global tokens in one softmax, and the global rows, of rows of one document."""
        x, positions, own, near, mask, listed, far, last = given
        index = find_global_tokens(mask, listed)
        y = merge_partials([near, attend_to_globals(*own, mask, far, index)]).y
        last = last._replace(operand_dtype="")  # of other projections, which are not wide
        y = y.astype(self.context.precision.compute)
        return scatter_tokens(y, self.attend_from_globals(x, positions, mask, last, index), index)

    def attend_packed(self, given: _Given) -> jax.Array:  # [B, T, N, H]
        """The same, however many documents there are in a row."""
        x, positions, own, near, mask, listed, far, last = given
        y = merge_partials([near, attend_to_packed_globals(*own, mask, far, listed)]).y
        last = last._replace(operand_dtype="")  # of other projections, which are not wide
        y = y.astype(self.context.precision.compute)
        theirs = project_qkv(self, x, positions, self.config, self.context, "_global")
        return attend_from_packed_globals(y, *theirs, mask, last, listed)

    @nn.nowrap
    def prepare_mask(
        self, mask: Mask, positions: jax.Array
    ) -> tuple[Mask, jax.Array, bool]:  # [B or 1, n] positions of global tokens
        """The mask with its arrays filled in, and whether there may be several documents."""
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
            lengths=None,
            globals=None,
        )
        if mask.single_document:
            return as_single_document(filled), listed, False
        return filled, listed, mask.segments is not None

    @nn.nowrap
    def attend_window(
        self, heads: QKV, mask: Mask, scoring: ScoreSpec, global_positions: jax.Array
    ) -> PartialAttention:
        """What queries find in their window, global keys left out."""
        config = self.config
        segments: Any = mask.key_segments
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
        """What the global tokens find, by projections of their own."""
        config, shared = self.config, self.context
        rows = gather_tokens(x, jnp.broadcast_to(index, (len(x), index.shape[1])))
        projected = config.resolved_num_kv_heads * config.resolved_head_dim(shared.d_model)
        few = 2 * index.shape[1] * config.num_heads <= projected
        if few and config.qk_norm is None and not isinstance(config.position, RoPE):
            q = project_queries(self, rows, config, shared, "_global")

            def look(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                return attend_from_tokens(q, k, v, mask, scoring, index)

            return attend_with_absorbed_projections(self, q, x, look, config, shared, "_global")
        heads = project_qkv(self, x, positions, config, shared, "_global")
        q = gather_tokens(heads.q, index)
        return attend_from_tokens(q, heads.k, heads.v, mask, scoring, index)


def _may_choose(mask: Mask, scoring: ScoreSpec) -> bool:
    """Whether the cheaper way may be taken where, as the program runs, no row is a pack.

    Not under a causal mask, where a later document would change how earlier ones are rounded. Nor
    with dropout: the two ways drop different weights, and what is dropped follows from an example's
    key alone, not from what else is in the batch.
    """
    drops = scoring.dropout_rate > 0 and scoring.dropout_rngs is not None
    return not mask.pattern.causal and not drops


MIXERS[LongformerConfig.kind] = Longformer
