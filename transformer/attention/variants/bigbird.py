"""BigBird: global, window and random blocks (Zaheer et al. 2020, section 2).

Blocks are cut by row index. A table of random blocks, drawn with NumPy from the seed and the layer,
is a constant of the layer.
"""

import dataclasses
import functools
import math
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

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
)
from transformer.attention.projections import QKV, MultiHeadConfig, combine_heads, project_qkv
from transformer.attention.reference import ScoreSpec
from transformer.attention.sparse_ops.block_gather import attend_selected_blocks
from transformer.attention.sparse_ops.global_tokens import attend_from_tokens, gather_tokens
from transformer.attention.sparse_ops.visible_key_counts import MeanVisibleKeys
from transformer.layers.basic import fold_in
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import (
    Bounds,
    Fraction,
    Seed,
)


@dataclasses.dataclass(frozen=True)
class BigBirdConfig(MultiHeadConfig):
    """Global, window and random blocks (Zaheer et al. 2020, section 2).

    Each block of queries attends to the global blocks, to a window of blocks and to a few random
    blocks. Global blocks attend to everything. They consist of the input's own tokens (the paper's
    ITC). For extra tokens (ETC), prepend them to the input and make their blocks global.
    """

    kind: ClassVar[str] = "bigbird"
    depends_on_row_index: ClassVar[bool] = True

    block_size: Annotated[int, Bounds(1, 2**16)] = 64
    """Tokens per block. Blocks are cut by row index. Packed documents stay separate, but each sees
    fewer keys than it would alone, and only the first one contains the first blocks."""
    num_global_blocks: Annotated[int, Bounds(0, 2**12)] = 1
    """Number of global blocks at the start of the row."""
    last_block_is_global: bool = True
    """Make the last block with a token global too, as the paper's code does. Ignored under a
    causal mask, where the last block changes as tokens are added."""
    num_window_blocks: Annotated[int, Bounds(1, 2**12)] = 3
    """Blocks of the window: an odd number, the query's block and equally many on each side."""
    num_random_blocks: Annotated[int, Bounds(0, 2**12)] = 3
    """r, random blocks per head and query block, outside the window and the first global blocks.
    Under a causal mask, random blocks ahead of the query are dropped."""
    random_block_span: Annotated[int, Bounds(1, 2**22)] = 4096
    """Tokens whose blocks are drawn from; set it to the longest length. In a shorter input, some
    drawn blocks do not exist. In a longer one, each stretch of this length draws from itself."""
    seed: Seed = 0
    """Seed of the random blocks, combined with the layer index."""
    dropout: Fraction = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.random_block_span < self.block_size:
            raise ValueError(
                f"BigBirdConfig.random_block_span {self.random_block_span}: give {self.block_size} "
                "or more, the size of a block"
            )
        if self.num_window_blocks % 2 == 0:
            raise ValueError(
                f"BigBirdConfig.num_window_blocks {self.num_window_blocks}: give an odd number: "
                "the block itself and as many on each side"
            )


@functools.lru_cache(maxsize=64)
def draw_random_blocks(config: BigBirdConfig, layer: int) -> Int[np.ndarray, "N R r"]:  # -1: none
    """Draw r blocks for each head and each of the R blocks of queries in `random_block_span`.

    Blocks of the window and the first, global blocks are not drawn, so a row may have fewer than r.
    """
    # The stream of the legacy generator is frozen across machines and versions.
    random = np.random.RandomState([config.seed, layer])
    num_blocks = -(-config.random_block_span // config.block_size)
    table = np.full((config.num_heads, num_blocks, config.num_random_blocks), -1, np.int32)
    blocks = np.arange(num_blocks)
    for head, query_block in np.ndindex(config.num_heads, num_blocks):
        is_outside = np.abs(blocks - query_block) > config.num_window_blocks // 2
        candidates = blocks[is_outside & (blocks >= config.num_global_blocks)]
        drawn_blocks = random.permutation(candidates)[: config.num_random_blocks]
        table[head, query_block, : len(drawn_blocks)] = drawn_blocks
    return table


def select_blocks(
    config: BigBirdConfig,
    random_blocks: np.ndarray | jax.Array,  # [N, R, r]
    num_blocks: int,
    last_block: Int[Array, "#B"] | None,  # the block that is global beside the first ones
    causal: bool,
) -> Int[Array, "#B N blocks m"]:  # none of them twice; -1: none
    """Return, per query block: global blocks, window blocks and random blocks, without duplicates.

    The table of random blocks covers R query blocks and repeats after them with shifted indices, so
    each stretch of R blocks draws from itself. Models of any length then have the same constants.
    """
    block_index, table_length = jnp.arange(num_blocks), random_blocks.shape[1]
    random_selected = jnp.asarray(random_blocks)[:, block_index % table_length]
    stretch_start = block_index // table_length * table_length
    random_selected = jnp.where(
        random_selected < 0, -1, random_selected + stretch_start[None, :, None]
    )
    reach = config.num_window_blocks // 2
    window_offsets = jnp.arange(-reach, 1 if causal else reach + 1)
    groups = [
        jnp.arange(config.num_global_blocks)[None, None, None, :],
        (block_index[:, None] + window_offsets[None, :])[None, None],
        random_selected[None],
    ]
    batch = 1
    if last_block is not None:
        groups.append(last_block[:, None, None, None])
        batch = len(last_block)
    shape = (batch, len(random_blocks), num_blocks)
    selected = jnp.concatenate(
        [jnp.broadcast_to(group, (*shape, group.shape[-1])) for group in groups], axis=-1
    )
    # Windows at both ends of the row, and draws beyond its end, select blocks that do not exist.
    selected = jnp.where((selected >= 0) & (selected < num_blocks), selected, -1)
    # Groups overlap: a window block may be global too. Its keys must be in the softmax once.
    is_same = selected[..., :, None] == selected[..., None, :]
    earlier = jnp.tri(selected.shape[-1], k=-1, dtype=bool)[None, None, None]
    return jnp.where((is_same & earlier).any(-1), -1, selected)


@register_mixer
class BigBird(Mixer):
    """Softmax over selected blocks; global queries attend to all keys."""

    config: BigBirdConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: BigBirdConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: BigBirdConfig, layer: int, width: int) -> Int[np.ndarray, "N R r"]:
        """Draw the random blocks of a layer."""
        return draw_random_blocks(config, layer)

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
        config, context, mask, cache = self.config, self.context, inputs.mask, inputs.cache
        reject_mask_patterns(config.kind, mask)
        q, k, v = self.project(x, inputs)
        score_spec = ScoreSpec(
            scale=1 / math.sqrt(q.shape[-1]),
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(inputs.dropout_rngs, 0),
        )
        if cache is not None:
            if not mask.pattern.causal:
                raise ValueError(
                    "mixer bigbird: decoding with a cache needs a causal mask; give one"
                )
            cache = cache.append(k, v, inputs.positions)
            y = self.attend_cached(q, inputs.positions, mask, score_spec, cache, inputs.constants)
            return combine_heads(self, y, inputs, cache)
        length = x.shape[1]
        selected = self.selected_blocks(mask, length, inputs.constants)
        # Queries of global blocks are computed here as well, and replaced below: blocks have equal
        # shapes, and the exception would cost more than it saves.
        y = attend_selected_blocks(q, k, v, mask, score_spec, selected, config.block_size).y
        index = self.global_token_indices(mask, length)
        if index.size:
            # Dropout keys of their own: the rows of global tokens are another call.
            global_spec = score_spec._replace(dropout_rngs=fold_in(inputs.dropout_rngs, 1))
            rows = attend_from_tokens(gather_tokens(q, index), k, v, mask, global_spec, index)
            y = scatter_tokens(y, rows, index)
        return combine_heads(self, y, inputs)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(self, x, inputs.positions)

    @nn.nowrap
    def attend_cached(
        self,
        q: Float[Array, "B T N H"],
        positions: Int[Array, "#B T"],  # -1: padding
        mask: Mask,
        score_spec: ScoreSpec,
        cache: KVCache,  # of S tokens, the new ones among them
        random_blocks: np.ndarray | jax.Array,  # [N, R, r]
    ) -> Float[Array, "B T N H"]:
        """Attend from new tokens to cached ones."""
        k, v, key_positions = cache.read(q.dtype)
        (batch, num_queries), length, block_size = q.shape[:2], k.shape[1], self.config.block_size
        positions = jnp.broadcast_to(positions, (batch, num_queries))
        selected = self.selected_blocks(mask, length, random_blocks)
        # Each query as a block of its own gathers m blocks: for a few queries that is less than
        # padding them to S.
        if num_queries <= -(-length // block_size):
            mask = mask.replace(positions=positions).with_keys(
                key_positions, keys_include_queries=True
            )
            query_selected = selected[0][:, jnp.maximum(positions, 0) // block_size]
            return attend_selected_blocks(
                q,
                k,
                v,
                mask,
                score_spec,
                jnp.moveaxis(query_selected, 1, 0),
                block_size,
                query_block_size=1,
            ).y
        # Many queries go by blocks, as without a cache: each stands at its position in a row of S.
        index = jnp.where(positions < 0, length, positions)
        row = scatter_tokens(jnp.zeros((batch, length, *q.shape[2:]), q.dtype), q, index)
        mask = mask.replace(positions=key_positions)
        y = attend_selected_blocks(row, k, v, mask, score_spec, selected, block_size).y
        return gather_tokens(y, index)

    @nn.nowrap
    def last_block(self, mask: Mask, length: int) -> Int[Array, "#B"] | None:
        """Return the last block that has a token if it is global, else None."""
        config = self.config
        if mask.pattern.causal or not config.last_block_is_global:
            return None
        segments = token_segments(mask, length)
        if segments is None:
            return jnp.full((1,), (length - 1) // config.block_size)
        index = jnp.where(segments != 0, jnp.arange(length)[None, :], 0)
        return index.max(1) // config.block_size

    @nn.nowrap
    def selected_blocks(
        self, mask: Mask, length: int, random_blocks: np.ndarray | jax.Array
    ) -> Int[Array, "#B N blocks m"]:
        """Return the key blocks of each query block."""
        num_blocks = -(-length // self.config.block_size)
        last_block = self.last_block(mask, length)
        return select_blocks(
            self.config, random_blocks, num_blocks, last_block, mask.pattern.causal
        )

    @nn.nowrap
    def global_token_indices(self, mask: Mask, length: int) -> Int[Array, "#B n"]:
        """Return the indices of the tokens in global blocks; T marks an unused slot."""
        config, last_block = self.config, self.last_block(mask, length)
        # Under a causal mask the first blocks see but themselves, which all blocks have chosen.
        num_blocks = 0 if mask.pattern.causal else config.num_global_blocks
        index = jnp.arange(num_blocks * config.block_size)[None, :]
        if last_block is not None:
            start = last_block[:, None] * config.block_size
            last_index = start + jnp.arange(config.block_size)[None, :]
            index = jnp.broadcast_to(index, (len(last_index), index.shape[1]))
            index = jnp.concatenate([index, last_index], axis=1)
        return jnp.minimum(index, length)

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> Bool[Array, "#B N T T"]:
        """Return the pattern token by token: selected blocks, and full rows of global tokens."""
        length, block_size = heads.q.shape[1], self.config.block_size
        selected = self.selected_blocks(inputs.mask, length, inputs.constants)
        blocks = jnp.arange(selected.shape[2])
        visible = (selected[..., None] == blocks[None, None, None, None, :]).any(-2)
        for axis in (2, 3):
            visible = jnp.repeat(visible, block_size, axis)
        global_index = self.global_token_indices(inputs.mask, length)
        is_global = (global_index[:, :, None] == jnp.arange(length)[None, None, :]).any(1)
        return visible[:, :, :length, :length] | is_global[:, None, :, None]


def bigbird_visible_keys(config: BigBirdConfig, length: int) -> MeanVisibleKeys:
    """Average over the selected blocks of layer 0; global queries see all keys."""
    block_index = np.arange(-(-length // config.block_size))
    block_sizes = np.minimum(config.block_size, length - block_index * config.block_size)
    num_blocks, random_blocks = len(block_index), draw_random_blocks(config, 0)

    def visible_blocks(causal: bool) -> Bool[np.ndarray, "N blocks blocks"]:
        has_last_block = config.last_block_is_global and not causal
        last_block = jnp.asarray(block_index[-1:]) if has_last_block else None
        selected = select_blocks(config, random_blocks, num_blocks, last_block, causal)
        visible = np.zeros((config.num_heads, num_blocks, num_blocks + 1), bool)
        # Index -1, no block, goes behind the last one.
        np.put_along_axis(visible, np.asarray(selected)[0], True, axis=-1)
        visible = visible[..., :-1]
        visible[:, : config.num_global_blocks] = True
        visible[:, num_blocks - 1 :] |= has_last_block
        return visible

    def mean(keys: np.ndarray) -> float:  # [N, blocks] of each query of a block
        return float((keys * block_sizes).sum() / (config.num_heads * length))

    earlier = visible_blocks(causal=True) & (block_index < block_index[:, None])
    return MeanVisibleKeys(
        bidirectional=mean(visible_blocks(causal=False) @ block_sizes),
        causal=mean(earlier @ block_sizes + (block_sizes + 1) / 2),
    )
