"""BigBird: global, window and random blocks (Zaheer et al. 2020, section 2).

Blocks are cut by row index. A table of random blocks, drawn with NumPy from the seed and the layer,
is a constant of the layer.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.attention.cache import KVCache, scatter_tokens
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
from transformer.attention.projections import QKV, combine_heads, project_qkv
from transformer.attention.reference import ScoreSpec
from transformer.attention.sparse_ops.block_gather import attend_selected_blocks
from transformer.attention.sparse_ops.global_tokens import attend_from_tokens, gather_tokens
from transformer.attention.sparse_ops.visible_key_counts import MeanVisibleKeys
from transformer.attention.variants.sparse_configs import BigBirdConfig
from transformer.layers.basic import fold_in
from transformer.taps import HEAD_OUTPUTS


@functools.lru_cache(maxsize=64)
def draw_random_blocks(
    seed: int,
    layer: int,
    num_heads: int,  # N
    num_blocks: int,  # R, blocks of the span that is drawn from
    num_random_blocks: int,  # r, drawn for each block of queries
    num_window_blocks: int,  # blocks of the window: these are not drawn,
    num_global_blocks: int,  # nor the first ones, which are global
) -> np.ndarray:  # [N, R, r] ints; -1: fewer candidates than r
    """Draw the random blocks of each query block, deterministic in seed and layer.

    The legacy NumPy generator is used because its stream is frozen across machines and versions.
    """
    random = np.random.RandomState([seed, layer])  # the legacy generator never changes its stream
    table = np.full((num_heads, num_blocks, num_random_blocks), -1, np.int32)
    every = np.arange(num_blocks)
    for head, row in np.ndindex(num_heads, num_blocks):
        others = every[
            (np.abs(every - row) > num_window_blocks // 2) & (every >= num_global_blocks)
        ]
        drawn_blocks = random.permutation(others)[:num_random_blocks]
        table[head, row, : len(drawn_blocks)] = drawn_blocks
    return table


def select_blocks(
    random_blocks: Any,  # [N, R, r]
    num_blocks: int,
    num_window_blocks: int,
    num_global_blocks: int,
    global_last_block: jax.Array | None,  # [B or 1] the block that is global beside the first ones
    causal: bool,
) -> jax.Array:  # [B or 1, N, blocks, m], none of them twice; -1: none
    """Return, per query block: global blocks, window blocks and random blocks, without duplicates.

    The table of random blocks covers R query blocks and repeats after them with shifted indices, so
    each stretch of R blocks draws from itself.
    """
    block_index, table_length = jnp.arange(num_blocks), random_blocks.shape[1]
    # The draws are constants of one size, so that a model takes any length with the same weights.
    random_selected = jnp.asarray(random_blocks)[:, block_index % table_length]
    random_selected = jnp.where(
        random_selected < 0,
        -1,
        random_selected + (block_index // table_length * table_length)[None, :, None],
    )
    window_blocks = (
        block_index[:, None]
        + jnp.arange(-(num_window_blocks // 2), 1 if causal else num_window_blocks // 2 + 1)[
            None, :
        ]
    )
    groups = [
        jnp.arange(num_global_blocks)[None, None, None, :],
        window_blocks[None, None],
        random_selected[None],
    ]
    if global_last_block is not None:
        groups.append(global_last_block[:, None, None, None])
    batch = 1 if global_last_block is None else len(global_last_block)
    shape = (batch, len(random_blocks), num_blocks)
    selected = jnp.concatenate(
        [jnp.broadcast_to(part, (*shape, part.shape[-1])) for part in groups], axis=-1
    )
    # Windows at both ends of the row, and draws beyond its end, select blocks that do not exist.
    selected = jnp.where((selected >= 0) & (selected < num_blocks), selected, -1)
    # Groups overlap: a window block may be global too. Its keys must be in the softmax once.
    is_same = selected[..., :, None] == selected[..., None, :]
    earlier = jnp.tri(selected.shape[-1], k=-1, dtype=bool)[None, None, None]
    return jnp.where((is_same & earlier).any(-1), -1, selected)


def last_nonempty_block(
    segments: jax.Array | None,  # [B or 1, T]; 0 is padding
    length: int,  # T
    block_size: int,
) -> jax.Array:  # [B or 1]
    """Return the last block that contains a token."""
    if segments is None:
        return jnp.full((1,), (length - 1) // block_size)
    index = jnp.where(segments != 0, jnp.arange(length)[None, :], 0)
    return index.max(1) // block_size


@register_mixer
class BigBird(Mixer):
    """Softmax over selected blocks; global queries attend to all keys."""

    config: BigBirdConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: BigBirdConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: BigBirdConfig, layer: int, width: int) -> np.ndarray:  # [N, R, r]
        """Draw the random blocks of a layer."""
        rows = -(-config.random_block_span // config.block_size)
        counts = (config.num_random_blocks, config.num_window_blocks, config.num_global_blocks)
        return draw_random_blocks(config.seed, layer, config.num_heads, rows, *counts)

    @staticmethod
    def score_flops(config: BigBirdConfig, width: int, length: int) -> ScoreFlops:
        return bigbird_visible_keys(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        """Return a cache for all tokens: later queries may select any block."""
        config = self.config
        head_dim = config.resolved_head_dim(self.context.d_model)
        dtype = self.context.precision.cache_dtype
        return KVCache.empty(batch, length, config.resolved_num_kv_heads, head_dim, dtype)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        cache = inputs.cache
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        q, k, v = self.project(x, inputs)
        score_spec = ScoreSpec(
            scale=1 / math.sqrt(q.shape[-1]),
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(inputs.dropout_rngs, 0),
        )
        if cache is not None:
            if not inputs.mask.pattern.causal:
                raise ValueError(
                    "mixer bigbird: decoding with a cache needs a causal mask; give one"
                )
            cache = cache.append(k, v, inputs.positions)
            y = self.attend_cached(
                q, inputs.positions, inputs.mask, score_spec, cache, inputs.constants
            )
            return combine_heads(self, y, inputs, cache)
        length = x.shape[1]
        selected = self.selected_blocks(inputs.mask, length, inputs.constants)
        # Queries of global blocks are computed here as well, and replaced below: blocks have equal
        # shapes, and the exception would cost more than it saves.
        y = attend_selected_blocks(q, k, v, inputs.mask, score_spec, selected, config.block_size).y
        global_index = self.global_token_indices(inputs.mask, length)
        if global_index.size:
            # Dropout keys of their own: the rows of global tokens are another call.
            global_spec = score_spec._replace(dropout_rngs=fold_in(inputs.dropout_rngs, 1))
            global_rows = attend_from_tokens(
                gather_tokens(q, global_index), k, v, inputs.mask, global_spec, global_index
            )
            y = scatter_tokens(y, global_rows, global_index)
        return combine_heads(self, y, inputs)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(
            self, x, inputs.positions, self.config, self.context, position=self.config.position
        )

    @nn.nowrap
    def attend_cached(
        self,
        q: jax.Array,  # [B, T, N, H]
        positions: jax.Array,  # [B or 1, T]; -1: padding
        mask: Mask,
        score_spec: ScoreSpec,
        cache: KVCache,  # of S tokens, the new ones among them
        random_blocks: Any,  # [N, R, r]
    ) -> jax.Array:  # [B, T, N, H]
        """Attend from new tokens to cached ones.

        A few queries gather their own blocks. Many queries go by blocks, as without a cache.
        """
        k, v, key_positions = cache.read(q.dtype)
        (batch, tokens), length, block = q.shape[:2], k.shape[1], self.config.block_size
        query_positions = jnp.broadcast_to(positions, (batch, tokens))
        selected = self.selected_blocks(mask, length, random_blocks)
        # Each query gathers m blocks of its own: for a few that is less than padding them to S
        # queries.
        if tokens <= -(-length // block):
            mask = mask.replace(positions=query_positions).with_keys(
                key_positions, keys_include_queries=True
            )
            # Each query is a block of its own and gathers the blocks of the row it stands in.
            own = jnp.moveaxis(selected[0][:, jnp.maximum(query_positions, 0) // block], 1, 0)
            return attend_selected_blocks(
                q, k, v, mask, score_spec, own, block, query_block_size=1
            ).y
        # Place each query at its position in a row of S queries. The results of the other queries
        # are discarded.
        index = jnp.where(query_positions < 0, length, query_positions)
        row = scatter_tokens(jnp.zeros((batch, length, *q.shape[2:]), q.dtype), q, index)
        mask = mask.replace(positions=key_positions)
        return gather_tokens(
            attend_selected_blocks(row, k, v, mask, score_spec, selected, block).y, index
        )

    @nn.nowrap
    def global_last_block(self, mask: Mask, length: int) -> jax.Array | None:  # [B or 1]
        """Return the last block if it is global, else None."""
        if mask.pattern.causal or not self.config.last_block_is_global:
            return None
        return last_nonempty_block(token_segments(mask, length), length, self.config.block_size)

    @nn.nowrap
    def selected_blocks(
        self, mask: Mask, length: int, random_blocks: jax.Array
    ) -> jax.Array:  # [B or 1, N, blocks, m]
        """Return the key blocks of each query block."""
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
        """Return the indices of the tokens in global blocks; T marks an unused slot."""
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
        """Return the pattern token by token: selected blocks, and full rows of global tokens."""
        length, block = heads.q.shape[1], self.config.block_size
        selected = self.selected_blocks(inputs.mask, length, inputs.constants)
        blocks = jnp.arange(selected.shape[2])
        visible = (selected[..., None] == blocks[None, None, None, None, :]).any(-2)
        for axis in (2, 3):
            visible = jnp.repeat(visible, block, axis)
        rows = (
            self.global_token_indices(inputs.mask, length)[:, :, None]
            == jnp.arange(length)[None, None, :]
        )
        return visible[:, :, :length, :length] | rows.any(1)[:, None, :, None]


def bigbird_visible_keys(config: BigBirdConfig, length: int) -> MeanVisibleKeys:
    """Average over the selected blocks of layer 0; global queries see all keys."""
    own = np.arange(-(-length // config.block_size))
    sizes = np.minimum(config.block_size, length - own * config.block_size)
    counts = (config.num_random_blocks, config.num_window_blocks, config.num_global_blocks)
    rows = -(-config.random_block_span // config.block_size)
    table = draw_random_blocks(config.seed, 0, config.num_heads, rows, *counts)

    def blocks(causal: bool) -> np.ndarray:  # [N, blocks, blocks] booleans
        last: Any = own[-1:] if config.last_block_is_global and not causal else None
        selected = np.asarray(select_blocks(table, len(own), *counts[1:], last, causal))[0]
        visible = np.zeros((config.num_heads, len(own), len(own) + 1), bool)
        np.put_along_axis(
            visible, selected, True, axis=-1
        )  # what is not there goes behind the last
        visible = visible[..., :-1]
        visible[:, : config.num_global_blocks] = True
        visible[:, own[-1:]] |= last is not None
        return visible

    def mean(keys: np.ndarray) -> float:  # [N, blocks] of each query of a block
        return float((keys * sizes).sum() / (config.num_heads * length))

    earlier = blocks(True) & (own < own[:, None])
    return MeanVisibleKeys(mean(blocks(False) @ sizes), mean(earlier @ sizes + (sizes + 1) / 2))
