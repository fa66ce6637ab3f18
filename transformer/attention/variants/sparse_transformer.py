"""Sparse Transformer: attention factorized into a local and a far component (Child et al. 2019).

Distances and blocks are measured in positions, which restart in every document. The far component
takes no more time than its pairs need:
- strided: tokens with the same position modulo the stride form a row of their own;
- fixed: the summary tokens of all blocks form a short list of keys.
"""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.partial import PartialAttention, merge_partials, widen
from transformer.attention.backends.tiling import Tiling, pad_mask, tile_mask
from transformer.attention.cache import KVCache
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
from transformer.attention.projections import QKV, MultiHeadConfig, combine_heads, project_qkv
from transformer.attention.reference import ScoreSpec, attend_reference
from transformer.attention.sparse_ops.global_tokens import attend_to_tokens, list_tokens
from transformer.attention.sparse_ops.mask_tokens import Tokens, query_and_key_tokens
from transformer.attention.sparse_ops.query_blocks import QUERY_BLOCK_SIZE, map_query_blocks
from transformer.attention.sparse_ops.strided_rows import attend_strided_rows
from transformer.attention.sparse_ops.visible_key_counts import (
    MeanVisibleKeys,
    symmetric_visible_keys,
)
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import PositiveInt

SparsePattern = Literal["strided", "fixed"]

Factorization = Literal["merged", "heads", "local", "far"]

HEAD_GROUPS: dict[Factorization, tuple[Factorization, ...]] = {
    "local": ("local",),
    "far": ("far",),
    "merged": ("merged",),
    "heads": ("local", "far"),
}
"""Pattern component of each group of heads. All groups have the same number of heads."""


@dataclasses.dataclass(frozen=True)
class SparseTransformerConfig(MultiHeadConfig):
    """Strided (equation 3) or fixed (equation 4) pattern of Child et al. 2019."""

    kind: ClassVar[str] = "sparse"

    pattern: SparsePattern = "strided"
    """strided: the last l tokens, and every l-th token before. fixed: the tokens of the query's
    own block of l tokens, and the last `num_summary_tokens` tokens of every block."""
    stride: PositiveInt = 64
    """l, near sqrt(T)."""
    num_summary_tokens: PositiveInt = 8
    """c, summary tokens per block of the fixed pattern."""
    factorization: Factorization = "merged"
    """merged: each head attends to both components. heads: half of the heads attend to each
    component. local or far: one component only, so that layers can alternate (section 5.2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pattern == "fixed" and self.num_summary_tokens > self.stride:
            raise ValueError(
                f"SparseTransformerConfig.num_summary_tokens {self.num_summary_tokens}: is more "
                "than the stride; give less"
            )
        # Key heads are divided, and each takes its group of query heads along.
        if self.resolved_num_kv_heads % len(HEAD_GROUPS[self.factorization]):
            raise ValueError(
                f"SparseTransformerConfig.num_heads {self.num_heads} (num_kv_heads "
                f"{self.resolved_num_kv_heads}): an odd number cannot be split into two halves; "
                "give an even number, or another SparseTransformerConfig.factorization"
            )


def pattern_mask(
    config: SparseTransformerConfig,
    component: Factorization,
    query_positions: Int[Array, "#B T"],
    key_positions: Int[Array, "#B S"],
) -> Bool[Array, "#B T S"]:
    """Return the keys that a component shows, before any other mask (equations 3 and 4)."""
    q, k, stride = query_positions[:, :, None], key_positions[:, None, :], config.stride
    if config.pattern == "strided":
        local, far = jnp.abs(q - k) <= stride, (q - k) % stride == 0
    else:
        local = q // stride == k // stride
        far = jnp.broadcast_to(is_summary_token(config, k), local.shape)
    return {"local": local, "far": far, "merged": local | far}[component]


def is_summary_token(config: SparseTransformerConfig, positions: jax.Array) -> jax.Array:
    """Return which tokens are among the last c of their block."""
    return positions % config.stride >= config.stride - config.num_summary_tokens


def attend_local(
    config: SparseTransformerConfig,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    pattern: MaskPattern,  # causal or not
    tokens: Tokens,  # [B or 1, T]
    score_spec: ScoreSpec,
    tile_size: int,
) -> PartialAttention:
    """Attend within a window (strided) or the block of the query (fixed)."""
    stride, segments = config.stride, tokens.segments
    window = stride + 1 if config.pattern == "strided" else stride
    if config.pattern == "fixed":
        # Each block of each document is a segment of its own.
        block = tokens.positions // stride
        numbers = 1 + segments * (q.shape[1] // stride + 2) + block
        segments = jnp.where(segments == 0, 0, numbers)
    pattern = dataclasses.replace(pattern, window=window)
    mask = Mask(pattern, positions=tokens.positions, segments=segments)
    return attend_blockwise(q, k, v, mask, score_spec, block_size=tile_size)


def attend_far(
    config: SparseTransformerConfig,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    tokens: Tokens,  # [B or 1, T]
    score_spec: ScoreSpec,
    *,
    direction: int,  # 1: keys up to the query, -1: keys from it on, 0: both
    exclude_local: bool,
) -> PartialAttention:
    """Attend to the far component, perhaps without the keys of the local one.

    `exclude_local`, which needs a direction, keeps merging from counting these keys twice.
    """
    length, stride, summary = q.shape[1], config.stride, config.num_summary_tokens
    # Under a causal mask, negated positions look ahead, and query positions lowered by a number
    # hide that many of the nearest keys.
    pattern = MaskPattern(causal=direction != 0)
    if config.pattern == "strided":
        row = jnp.arange(length)[None, :] // stride  # index among every `stride`-th token
        nearest = 2 if exclude_local else 0
        mask = Mask(
            pattern,
            positions=direction * row - nearest,
            key_positions=direction * row,
            segments=tokens.segments,
        )
        return attend_strided_rows(q, k, v, mask, score_spec, stride)
    # If documents start at position 0, there are at most T c / stride summary tokens, for c tokens
    # of a block. A document that continues from an earlier row may start elsewhere: the row can
    # then begin and end within summary tokens, which adds c (stride - c) / stride more.
    size = min(length, summary * (length + stride - summary) // stride)
    is_summary = is_summary_token(config, tokens.positions) & (tokens.segments != 0)
    # The local component has the whole block of the query: exclude by block, not by token.
    place = tokens.positions // stride if exclude_local else tokens.positions
    nearest = 1 if exclude_local else 0
    mask = Mask(
        pattern,
        positions=direction * place - nearest,
        key_positions=direction * place,
        segments=tokens.segments,
    )
    return attend_to_tokens(q, k, v, mask, score_spec, list_tokens(is_summary, size))


@register_mixer
class SparseTransformer(Mixer):
    """Softmax over both components, or one component for each half of the heads."""

    config: SparseTransformerConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: SparseTransformerConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def score_flops(config: SparseTransformerConfig, width: int, length: int) -> ScoreFlops:
        return sparse_transformer_visible_keys(config, length).flops(config, width)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        config = self.config
        head_dim = config.resolved_head_dim(self.context.d_model)
        dtype = self.context.precision.cache_dtype
        return KVCache.empty(batch, length, config.resolved_num_kv_heads, head_dim, dtype)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, mask, cache = self.config, inputs.mask, inputs.cache
        reject_mask_patterns(config.kind, mask)
        q, k, v = self.project(x, inputs)
        mask = mask.replace(positions=inputs.positions)
        attend_component = self.attend_row
        if cache is not None:
            cache = cache.append(k, v, inputs.positions)
            k, v, key_positions = cache.read(q.dtype)
            mask = mask.with_keys(key_positions, keys_include_queries=True)
            attend_component = self.attend_cached
        components = HEAD_GROUPS[config.factorization]
        q_groups, k_groups, v_groups = (jnp.split(x, len(components), axis=2) for x in (q, k, v))
        outputs = [
            attend_component(component, q, k, v, mask)
            for component, q, k, v in zip(components, q_groups, k_groups, v_groups, strict=True)
        ]
        return combine_heads(self, jnp.concatenate(outputs, axis=2), inputs, cache)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:
        """Declare the projections; return queries [B, T, N, H], keys and values [B, T, K, H]."""
        return project_qkv(self, x, inputs.positions)

    @nn.nowrap
    def attend_row(
        self,
        component: Factorization,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        mask: Mask,
    ) -> Float[Array, "B T N H"]:
        """Compute the components separately and merge them into one softmax."""
        config, pattern, dtype = self.config, mask.pattern, v.dtype
        _, tokens = query_and_key_tokens(mask, q.shape[1], k.shape[1])
        # Not rounded before the merge, and gradients of the components are added before rounding.
        score_spec, (q, k, v) = widen(self.score_spec(q), q, k, v)
        partials: list[PartialAttention] = []
        if component != "far":
            tile_size = self.context.hardware.tile_size
            partials.append(attend_local(config, q, k, v, pattern, tokens, score_spec, tile_size))
        if component != "local":
            exclude_local = component == "merged"
            # Without the local keys, the far keys of a bidirectional query are two ranges, one on
            # each side: a causal mask describes one of them at a time.
            both = [1, -1] if exclude_local else [0]
            for direction in [1] if pattern.causal else both:
                partials.append(
                    attend_far(
                        config,
                        q,
                        k,
                        v,
                        tokens,
                        score_spec,
                        direction=direction,
                        exclude_local=exclude_local,
                    )
                )
        return merge_partials(partials).y.astype(dtype)

    @nn.nowrap
    def attend_cached(
        self,
        component: Factorization,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        mask: Mask,
    ) -> Float[Array, "B T N H"]:
        """Attend to all cached keys with a dense mask, one block of queries at a time.

        The sparse functions are for self-attention of T tokens. Against a cache, a block of queries
        scores all S keys: exact, and in memory linear in S.
        """
        dtype, num_queries, num_keys = v.dtype, q.shape[1], k.shape[1]
        score_spec, (q, k, v) = widen(self.score_spec(q), q, k, v)
        tiling = Tiling(
            num_queries,
            num_keys,
            min(QUERY_BLOCK_SIZE, num_queries),
            num_keys,
            lookback=None,
            lookahead=None,
        )
        padded_mask = pad_mask(mask, tiling)

        def attend_block(block_index: jax.Array, q: jax.Array) -> Float[Array, "B R N H"]:
            block_mask = tile_mask(padded_mask, tiling, block_index, 0)
            positions = block_mask.resolved_positions(q.shape[1], num_keys)
            allowed = pattern_mask(self.config, component, *positions)
            return attend_reference(q, k, v, block_mask.replace(allowed=allowed), score_spec)[0]

        return map_query_blocks(attend_block, (q,), block_size=QUERY_BLOCK_SIZE).astype(dtype)

    @nn.nowrap
    def score_spec(self, q: jax.Array) -> ScoreSpec:
        return ScoreSpec(1 / math.sqrt(q.shape[-1]), softmax_dtype=self.context.precision.softmax)

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> Bool[Array, "#B N T T"]:
        """Return the pattern of each head."""
        components, positions = HEAD_GROUPS[self.config.factorization], inputs.positions
        masks = [
            pattern_mask(self.config, component, positions, positions) for component in components
        ]
        heads_per_group = self.config.num_heads // len(components)
        return jnp.repeat(jnp.stack(masks, axis=1), heads_per_group, axis=1)


def sparse_transformer_visible_keys(
    config: SparseTransformerConfig, length: int
) -> MeanVisibleKeys:
    """Average over queries and heads for the strided or fixed pattern."""
    index, stride, summary = np.arange(length), config.stride, config.num_summary_tokens
    if config.pattern == "strided":
        local, far = np.minimum(index, stride), index // stride
        in_both = (index >= stride) * 1
        components = {"local": (local, 1), "far": (far, 1), "merged": (local + far - in_both, 1)}
    else:
        place = index % stride
        earlier, is_summary = index // stride * summary, place >= stride - summary
        components = {
            "local": (place, 1),
            # A query sees itself only if it is a summary token.
            "far": (earlier + np.maximum(0, place - (stride - summary)), is_summary.mean()),
            "merged": (earlier + place, 1),
        }
    counts = [
        symmetric_visible_keys(*components[component])
        for component in HEAD_GROUPS[config.factorization]
    ]
    return MeanVisibleKeys(*(float(np.mean(means)) for means in zip(*counts, strict=True)))
