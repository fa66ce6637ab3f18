"""BigBird: global, window and random blocks (Zaheer et al. 2020)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.attend import ScoreSpec
from transformer.attend.sparse.chosen_blocks import attend_selected_blocks
from transformer.attend.sparse.rows import attend_from_tokens, gather_tokens, scatter_tokens
from transformer.cache import KVCache
from transformer.documents import token_segments
from transformer.dropout import fold_in
from transformer.heads import QKV, project_output, project_qkv
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.refusals import reject_mask_patterns, reject_memory, reject_weights
from transformer.variants.bigbird_pattern import (
    draw_random_blocks,
    last_nonempty_block,
    select_blocks,
)
from transformer.variants.configs import BigBirdConfig as BigBirdConfig
from transformer.variants.keys_seen import bigbird_visible_keys


class BigBird(Mixer):
    """Softmax attention over chosen blocks; of global queries, over all."""

    config: BigBirdConfig

    @staticmethod
    def abilities(config: BigBirdConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: BigBirdConfig, layer: int, width: int) -> np.ndarray:  # [N, R, r]
        """The random blocks of a layer."""
        rows = -(-config.random_block_span // config.block_size)
        counts = (config.num_random_blocks, config.num_window_blocks, config.num_global_blocks)
        return draw_random_blocks(config.seed, layer, config.num_heads, rows, *counts)

    @staticmethod
    def score_flops(config: BigBirdConfig, width: int, length: int) -> ScoreFlops:
        return bigbird_visible_keys(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        """Of all tokens: which blocks a later one will see is not known before."""
        config, dtype = self.config, self.context.precision.compute
        shape = (
            batch,
            length,
            config.resolved_num_kv_heads,
            config.resolved_head_dim(self.context.d_model),
        )
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        cache = inputs.cache
        config, shared = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        q, k, v = self.project(x, inputs)
        scoring = ScoreSpec(
            scale=1 / math.sqrt(q.shape[-1]),
            softmax_dtype=shared.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(inputs.dropout_rngs, 0),
        )
        if cache is not None:
            if not inputs.mask.pattern.causal:
                raise ValueError("mixer bigbird: decodes under a causal mask; give one")
            cache = cache.write(k, v, inputs.positions)
            y = self.attend_cached(
                q, inputs.positions, inputs.mask, scoring, cache, inputs.constants
            )
            return MixerOutput(project_output(self, y, config, shared), cache, {})
        length = x.shape[1]
        chosen = self.selected_blocks(inputs.mask, length, inputs.constants)
        y = attend_selected_blocks(q, k, v, inputs.mask, scoring, chosen, config.block_size).y
        index = self.global_token_indices(inputs.mask, length)
        if index.size:
            again = scoring._replace(dropout_rngs=fold_in(inputs.dropout_rngs, 1))
            rows = attend_from_tokens(gather_tokens(q, index), k, v, inputs.mask, again, index)
            y = scatter_tokens(y, rows, index)
        return MixerOutput(project_output(self, y, config, shared), None, {})

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(self, x, inputs.positions, self.config, self.context)

    @nn.nowrap
    def attend_cached(
        self,
        q: jax.Array,  # [B, T, N, H]
        positions: jax.Array,  # [B or 1, T]; -1: padding
        mask: Mask,
        scoring: ScoreSpec,
        cache: KVCache,  # of S tokens, the new ones among them
        random_blocks: Any,  # [N, R, r]
    ) -> jax.Array:  # [B, T, N, H]
        """A few queries each gather the blocks they see; many go by blocks, as without a cache."""
        (batch, tokens), length, block = q.shape[:2], cache.keys.shape[1], self.config.block_size
        here = jnp.broadcast_to(positions, (batch, tokens))
        chosen = self.selected_blocks(mask, length, random_blocks)
        kept = cache.keys, cache.values
        if tokens <= -(-length // block):
            mask = mask.replace(positions=here).with_keys(
                cache.positions, keys_include_queries=True
            )
            own = jnp.moveaxis(chosen[0][:, jnp.maximum(here, 0) // block], 1, 0)
            return attend_selected_blocks(q, *kept, mask, scoring, own, block, query_block_size=1).y
        # Each stands in a row of S queries where its key does: the others find nothing of interest.
        index = jnp.where(here < 0, length, here)
        row = scatter_tokens(jnp.zeros((batch, length, *q.shape[2:]), q.dtype), q, index)
        mask = mask.replace(positions=cache.positions)
        return gather_tokens(
            attend_selected_blocks(row, *kept, mask, scoring, chosen, block).y, index
        )

    @nn.nowrap
    def global_last_block(self, mask: Mask, length: int) -> jax.Array | None:  # [B or 1]
        """The last block, if it is global."""
        if mask.pattern.causal or not self.config.last_block_is_global:
            return None
        return last_nonempty_block(token_segments(mask, length), length, self.config.block_size)

    @nn.nowrap
    def selected_blocks(
        self, mask: Mask, length: int, random_blocks: jax.Array
    ) -> jax.Array:  # [B or 1, N, blocks, m]
        """The blocks that each block of queries sees."""
        config = self.config
        counts = (
            -(-length // config.block_size),
            config.num_window_blocks,
            config.num_global_blocks,
        )
        last = self.global_last_block(mask, length)
        return select_blocks(random_blocks, *counts, last, mask.pattern.causal)

    @nn.nowrap
    def global_token_indices(self, mask: Mask, length: int) -> jax.Array:  # [B or 1, n]
        """The tokens of global blocks; T where there is none."""
        block, last = self.config.block_size, self.global_last_block(mask, length)
        # Under a causal mask the first blocks see but themselves, which all blocks have chosen.
        first = 0 if mask.pattern.causal and mask.pattern.ordered else self.config.num_global_blocks
        index = jnp.arange(first * block)[None, :]
        if last is not None:
            ends = last[:, None] * block + jnp.arange(block)[None, :]
            index = jnp.broadcast_to(index, (len(ends), index.shape[1]))
            index = jnp.concatenate([index, ends], axis=1)
        return jnp.minimum(index, length)

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B or 1, N, T, T] booleans
        """Chosen blocks token by token, and the rows of global ones."""
        length, block = heads.q.shape[1], self.config.block_size
        chosen = self.selected_blocks(inputs.mask, length, inputs.constants)
        blocks = jnp.arange(chosen.shape[2])
        seen = (chosen[..., None] == blocks[None, None, None, None, :]).any(-2)
        for axis in (2, 3):
            seen = jnp.repeat(seen, block, axis)
        rows = (
            self.global_token_indices(inputs.mask, length)[:, :, None]
            == jnp.arange(length)[None, None, :]
        )
        return seen[:, :, :length, :length] | rows.any(1)[:, None, :, None]


MIXERS[BigBirdConfig.kind] = BigBird
