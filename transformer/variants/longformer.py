"""Longformer: a window for every token, and a few global tokens (Beltagy et al. 2020)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attend import Looked, Scoring, merge
from transformer.attend.sparse.dilated import attend_dilated
from transformer.attend.sparse.global_tokens import (
    are_global,
    as_one_document,
    attend_to_globals,
    distinct,
    global_index,
    of_one_document,
)
from transformer.attend.sparse.packed_globals import to_packed, with_packed_rows
from transformer.attend.sparse.rows import look_rows, put_rows, take_rows
from transformer.documents import documents
from transformer.dropout import fold
from transformer.heads import Heads, join, project, projected_less, query_heads
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.positions import Rotary
from transformer.refusals import refuse_memory, refuse_patterns, refuse_weights
from transformer.variants.configs import LongformerConfig
from transformer.variants.keys_seen import in_longformer
from transformer.variants.longformer_decoding import LongformerCache, decoded

__all__ = ["Longformer", "LongformerConfig"]


class _Given(NamedTuple):
    """What both ways of looking at global tokens, and from them, start with."""

    x: jax.Array  # [B, T, D]
    positions: jax.Array  # [B or 1, T]
    own: Heads
    near: Looked  # in the window
    mask: Mask  # with positions, segments and key_segments [B or 1, T]
    listed: jax.Array  # [B or 1, n] positions of global tokens; -1: none
    far: Scoring  # of global keys
    last: Scoring  # of global queries


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
        return in_longformer(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LongformerCache:
        """Of a window's reach and the global tokens, however many tokens will come."""
        config, shared = self.config, self.shared
        first, reach = min(config.global_tokens, length), min(config.reach, length)
        heads = config.key_heads, config.query_width(shared.width)
        return LongformerCache.empty(batch, reach, first, *heads, shared.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        mask, cache = inputs.mask, inputs.cache
        config, shared = self.config, self.shared
        refuse_memory(config.kind, inputs.memory)
        refuse_weights(config.kind, inputs.outputs)
        refuse_patterns(config.kind, mask.replace(globals=None))
        own = project(self, x, inputs.positions, config, shared)
        scoring = Scoring(
            scale=1 / math.sqrt(own.q.shape[-1]),
            softmax_dtype=shared.precision.softmax,
            rate=config.dropout,
            dropout_rngs=inputs.dropout_rngs,
        )
        if cache is not None:
            y, cache = decoded(self, x, inputs.positions, own, mask, scoring, cache)
            return MixerOutput(join(self, y, config, shared), cache, {})
        mask, listed, packed = self.described(mask, inputs.positions)
        scoring, wide = scoring.widened(*own)  # to merge two parts, and add up their gradients
        own = Heads(*wide)
        near = self.near(own, mask, scoring, listed)
        if not listed.shape[1]:
            if self.is_initializing():  # another mask may list some
                project(self, x, inputs.positions, config, shared, "_global")
            y = near.y.astype(shared.precision.compute)
            return MixerOutput(join(self, y, config, shared), None, {})
        far, last = (
            scoring._replace(dropout_rngs=fold(inputs.dropout_rngs, part)) for part in (1, 2)
        )
        given = _Given(x, inputs.positions, own, near, mask, listed, far, last)
        if not packed:
            y = self.alone(given)
        elif self.is_initializing() or not _may_choose(mask, scoring):
            y = self.in_pack(given)
        else:  # Flax's `cond`, as both branches read weights of the module
            # What a branch keeps for its gradient takes room though the other one runs: of packs,
            # projections of every token, which are made again instead.
            y = nn.cond(
                of_one_document(mask),
                lambda module: module.alone(given._replace(mask=as_one_document(mask))),
                nn.remat(lambda module: module.in_pack(given)),
                self,
            )
        return MixerOutput(join(self, y, config, shared), None, {})

    def alone(self, given: _Given) -> jax.Array:  # [B, T, N, H]
        """Window and global tokens in one softmax, and the global rows, of rows of one document."""
        x, positions, own, near, mask, listed, far, last = given
        index = global_index(mask, listed)
        y = merge([near, attend_to_globals(*own, mask, far, index)]).y
        last = last._replace(operands="")  # of other projections, which are not wide
        y = y.astype(self.shared.precision.compute)
        return put_rows(y, self.of_globals(x, positions, mask, last, index), index)

    def in_pack(self, given: _Given) -> jax.Array:  # [B, T, N, H]
        """The same, however many documents there are in a row."""
        x, positions, own, near, mask, listed, far, last = given
        y = merge([near, to_packed(*own, mask, far, listed)]).y
        last = last._replace(operands="")  # of other projections, which are not wide
        y = y.astype(self.shared.precision.compute)
        theirs = project(self, x, positions, self.config, self.shared, "_global")
        return with_packed_rows(y, *theirs, mask, last, listed)

    @nn.nowrap
    def described(
        self, mask: Mask, positions: jax.Array
    ) -> tuple[Mask, jax.Array, bool]:  # [B or 1, n] positions of global tokens
        """The mask with its arrays filled in, and whether there may be several documents."""
        length = positions.shape[1]
        first = jnp.arange(self.config.global_tokens)[None, :]
        listed = first if mask.globals is None else distinct(jnp.asarray(mask.globals))
        ones = jnp.ones((1, length), jnp.int32)
        real = documents(mask, length)
        filled = mask.replace(
            positions=jnp.asarray(positions if mask.positions is None else mask.positions),
            segments=ones if mask.segments is None else mask.segments,
            key_segments=ones if real is None else real,
            lengths=None,
            globals=None,
        )
        if mask.one_document:
            return as_one_document(filled), listed, False
        return filled, listed, mask.segments is not None

    @nn.nowrap
    def near(self, heads: Heads, mask: Mask, scoring: Scoring, listed: jax.Array) -> Looked:
        """What queries find in their window, global keys left out."""
        config = self.config
        segments: Any = mask.key_segments
        hidden = are_global(mask, listed)
        mask = mask.replace(key_segments=jnp.where(hidden, 0, segments))
        again = scoring._replace(dropout_rngs=fold(scoring.dropout_rngs, 0))
        sizes = config.window, config.dilations, self.shared.hardware.tile
        return attend_dilated(*heads, mask, again, *sizes)

    def of_globals(
        self,
        x: jax.Array,  # [B, T, D]
        positions: jax.Array,  # [B or 1, T]
        mask: Mask,
        scoring: Scoring,
        index: jax.Array,  # [B or 1, n]
    ) -> jax.Array:  # [B, n, N, H]
        """What the global tokens find, by projections of their own."""
        config, shared = self.config, self.shared
        rows = take_rows(x, jnp.broadcast_to(index, (len(x), index.shape[1])))
        projected = config.key_heads * config.query_width(shared.width)
        few = 2 * index.shape[1] * config.heads <= projected
        if few and config.qk_norm is None and not isinstance(config.position, Rotary):
            q = query_heads(self, rows, config, shared, "_global")

            def look(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                return look_rows(q, k, v, mask, scoring, index)

            return projected_less(self, q, x, look, config, shared, "_global")
        heads = project(self, x, positions, config, shared, "_global")
        q = take_rows(heads.q, index)
        return look_rows(q, heads.k, heads.v, mask, scoring, index)


def _may_choose(mask: Mask, scoring: Scoring) -> bool:
    """Whether the cheaper way may be taken where, as the program runs, no row is a pack.

    Not under a causal mask, where a later document would change how earlier ones are rounded. Nor
    with dropout: the two ways drop different weights, and what is dropped follows from an example's
    key alone, not from what else is in the batch.
    """
    drops = scoring.rate > 0 and scoring.dropout_rngs is not None
    return not mask.pattern.causal and not drops


MIXERS[LongformerConfig.kind] = Longformer
