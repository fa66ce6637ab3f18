"""BigBird: global, window and random blocks (Zaheer et al. 2020)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.attend import Scoring
from transformer.attend.sparse.chosen_blocks import attend_chosen_blocks
from transformer.attend.sparse.rows import look_rows, put_rows, take_rows
from transformer.cache import KVCache
from transformer.documents import documents
from transformer.dropout import fold
from transformer.heads import Heads, join, project
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.refusals import refuse_memory, refuse_patterns, refuse_weights
from transformer.variants.bigbird_pattern import chosen_blocks, last_block, random_blocks
from transformer.variants.configs import BigBirdConfig as BigBirdConfig
from transformer.variants.keys_seen import in_bigbird


class BigBird(Mixer):
    """Softmax attention over chosen blocks; of global queries, over all."""

    config: BigBirdConfig

    @staticmethod
    def abilities(config: BigBirdConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: BigBirdConfig, layer: int, width: int) -> np.ndarray:  # [N, R, r]
        """The random blocks of a layer."""
        rows = -(-config.span // config.block)
        counts = (config.random_blocks, config.window_blocks, config.global_blocks)
        return random_blocks(config.seed, layer, config.heads, rows, *counts)

    @staticmethod
    def score_flops(config: BigBirdConfig, width: int, length: int) -> ScoreFlops:
        return in_bigbird(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        """Of all tokens: which blocks a later one will see is not known before."""
        config, dtype = self.config, self.shared.precision.compute
        shape = (batch, length, config.key_heads, config.query_width(self.shared.width))
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        cache = inputs.cache
        config, shared = self.config, self.shared
        refuse_memory(config.kind, inputs.memory)
        refuse_weights(config.kind, inputs.outputs)
        refuse_patterns(config.kind, inputs.mask)
        q, k, v = self.project(x, inputs)
        scoring = Scoring(
            scale=1 / math.sqrt(q.shape[-1]),
            softmax_dtype=shared.precision.softmax,
            rate=config.dropout,
            dropout_rngs=fold(inputs.dropout_rngs, 0),
        )
        if cache is not None:
            if not inputs.mask.pattern.causal:
                raise ValueError("mixer bigbird: decodes under a causal mask; give one")
            cache = cache.write(k, v, inputs.positions)
            y = self.decoded(q, inputs.positions, inputs.mask, scoring, cache, inputs.constants)
            return MixerOutput(join(self, y, config, shared), cache, {})
        length = x.shape[1]
        chosen = self.chosen(inputs.mask, length, inputs.constants)
        y = attend_chosen_blocks(q, k, v, inputs.mask, scoring, chosen, config.block).y
        index = self.global_rows(inputs.mask, length)
        if index.size:
            again = scoring._replace(dropout_rngs=fold(inputs.dropout_rngs, 1))
            rows = look_rows(take_rows(q, index), k, v, inputs.mask, again, index)
            y = put_rows(y, rows, index)
        return MixerOutput(join(self, y, config, shared), None, {})

    def project(self, x: jax.Array, inputs: MixerInputs) -> Heads:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project(self, x, inputs.positions, self.config, self.shared)

    @nn.nowrap
    def decoded(
        self,
        q: jax.Array,  # [B, T, N, H]
        positions: jax.Array,  # [B or 1, T]; -1: padding
        mask: Mask,
        scoring: Scoring,
        cache: KVCache,  # of S tokens, the new ones among them
        table: Any,  # [N, R, r]
    ) -> jax.Array:  # [B, T, N, H]
        """A few queries each gather the blocks they see; many go by blocks, as without a cache."""
        (batch, tokens), length, block = q.shape[:2], cache.keys.shape[1], self.config.block
        here = jnp.broadcast_to(positions, (batch, tokens))
        chosen = self.chosen(mask, length, table)
        kept = cache.keys, cache.values
        if tokens <= -(-length // block):
            mask = mask.replace(positions=here).over(cache.positions, holds_queries=True)
            own = jnp.moveaxis(chosen[0][:, jnp.maximum(here, 0) // block], 1, 0)
            return attend_chosen_blocks(q, *kept, mask, scoring, own, block, rows=1).y
        # Each stands in a row of S queries where its key does: the others find nothing of interest.
        index = jnp.where(here < 0, length, here)
        row = put_rows(jnp.zeros((batch, length, *q.shape[2:]), q.dtype), q, index)
        mask = mask.replace(positions=cache.positions)
        return take_rows(attend_chosen_blocks(row, *kept, mask, scoring, chosen, block).y, index)

    @nn.nowrap
    def last(self, mask: Mask, length: int) -> jax.Array | None:  # [B or 1]
        """The last block, if it is global."""
        if mask.pattern.causal or not self.config.last_is_global:
            return None
        return last_block(documents(mask, length), length, self.config.block)

    @nn.nowrap
    def chosen(
        self, mask: Mask, length: int, table: jax.Array
    ) -> jax.Array:  # [B or 1, N, blocks, m]
        """The blocks that each block of queries sees."""
        config = self.config
        counts = (-(-length // config.block), config.window_blocks, config.global_blocks)
        last = self.last(mask, length)
        return chosen_blocks(table, *counts, last, mask.pattern.causal)

    @nn.nowrap
    def global_rows(self, mask: Mask, length: int) -> jax.Array:  # [B or 1, n]
        """The tokens of global blocks; T where there is none."""
        block, last = self.config.block, self.last(mask, length)
        # Under a causal mask the first blocks see but themselves, which all blocks have chosen.
        first = 0 if mask.pattern.causal and mask.pattern.ordered else self.config.global_blocks
        index = jnp.arange(first * block)[None, :]
        if last is not None:
            ends = last[:, None] * block + jnp.arange(block)[None, :]
            index = jnp.broadcast_to(index, (len(ends), index.shape[1]))
            index = jnp.concatenate([index, ends], axis=1)
        return jnp.minimum(index, length)

    @nn.nowrap
    def select(
        self,
        heads: Heads,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B or 1, N, T, T] booleans
        """Chosen blocks token by token, and the rows of global ones."""
        length, block = heads.q.shape[1], self.config.block
        chosen = self.chosen(inputs.mask, length, inputs.constants)
        blocks = jnp.arange(chosen.shape[2])
        seen = (chosen[..., None] == blocks[None, None, None, None, :]).any(-2)
        for axis in (2, 3):
            seen = jnp.repeat(seen, block, axis)
        rows = (
            self.global_rows(inputs.mask, length)[:, :, None] == jnp.arange(length)[None, None, :]
        )
        return seen[:, :, :length, :length] | rows.any(1)[:, None, :, None]


MIXERS[BigBirdConfig.kind] = BigBird
