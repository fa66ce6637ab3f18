"""Primer attention: a depthwise convolution after each projection (So et al. 2021)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attention.attend import attend
from transformer.attention.cache import KVCache
from transformer.attention.masks import Mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_memory,
)
from transformer.attention.position_bias import position_terms
from transformer.attention.reference import ScoreSpec
from transformer.attention.rope import RoPE, apply_rope
from transformer.attention.sparse_ops.local_window import NeighborCache, neighbor_window
from transformer.attention.variants.linear_configs import PrimerConfig
from transformer.layers.basic import apply_linear, declare_weight, fold_in
from transformer.taps import ATTENTION_VALUES

KERNEL_SIZE = 3


PROJECTIONS = ("query", "key", "value")


class PrimerCache(struct.PyTreeNode):
    """Convolved keys and values, and the last two inputs of each convolution."""

    kv: KVCache
    conv_inputs: tuple[NeighborCache, ...]  # [B, 2, N, H] of queries, keys and values

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        length: int,  # S
        num_heads: int,  # N
        head_dim: int,  # H
        dtype: Any,
    ) -> "PrimerCache":
        """Return a cache without tokens."""
        kv = KVCache.empty(batch_size, length, num_heads, head_dim, dtype)
        inputs = NeighborCache.empty(batch_size, KERNEL_SIZE - 1, (num_heads, head_dim), dtype)
        return cls(kv, (inputs,) * len(PROJECTIONS))


@register_mixer
class Primer(Mixer):
    """Softmax attention over convolved queries, keys and values."""

    config: PrimerConfig

    values = ATTENTION_VALUES

    @staticmethod
    def abilities(config: PrimerConfig) -> Abilities:
        return Abilities(cross=False)

    @staticmethod
    def constants(config: PrimerConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: PrimerConfig, width: int, length: int) -> ScoreFlops:
        each = config.num_heads * 2 * config.resolved_head_dim(width)
        return ScoreFlops(full=2 * each * length, causal=each * (length + 1))

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> PrimerCache:
        sizes = batch, length, self.config.num_heads
        head_dim = self.config.resolved_head_dim(self.context.d_model)
        return PrimerCache.empty(*sizes, head_dim, self.context.precision.cache_dtype)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        mask, cache = inputs.mask, inputs.cache
        config, context = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        head = config.resolved_head_dim(context.d_model)
        axes, embed = {"heads": config.num_heads, "head": head}, {"embed": context.d_model}
        project = functools.partial(apply_linear, self, inputs=embed, outputs=axes, context=context)
        projected = [project(name, x, bias=config.bias) for name in PROJECTIONS]
        previous = [None] * len(projected) if cache is None else cache.conv_inputs
        q, k, v = (
            self.depthwise_convolution(name, each, conv_cache, inputs.positions, mask)
            for name, each, conv_cache in zip(PROJECTIONS, projected, previous, strict=True)
        )
        # RoPE after the convolution: weights per channel do not commute with rotations of channel
        # pairs, so in the other order scores would depend on absolute positions.
        if isinstance(config.position, RoPE):
            q, k = (apply_rope(each, inputs.positions, config.position) for each in (q, k))
        if cache is not None:
            kv = cache.kv.append(k, v, inputs.positions)
            conv_inputs = [
                conv_cache.append(each, inputs.positions)
                for conv_cache, each in zip(cache.conv_inputs, projected, strict=True)
            ]
            cache = PrimerCache(kv, tuple(conv_inputs))
            k, v, key_positions = kv.read(q.dtype)
            mask = mask.with_keys(key_positions, keys_include_queries=True)
        terms = position_terms(
            self,
            config.position,
            context,
            num_heads=config.num_heads,
            key_head_dim=head,
            value_head_dim=head,
            shared_bias=inputs.shared_bias,
        )
        score_spec = ScoreSpec(
            scale=1 / math.sqrt(head),
            **terms._asdict(),
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(inputs.dropout_rngs, 0),
        )
        attended = attend(
            q,
            k,
            v,
            mask,
            score_spec,
            hardware=context.hardware,
            constrain=context.constrain,
            outputs=inputs.outputs,
            taps=inputs.taps,
        )
        y = apply_linear(
            self, "output", attended.y, axes, embed, context, bias=config.bias, residual=True
        )
        return MixerOutput(y, cache, attended.aux)

    def depthwise_convolution(
        self,
        name: str,
        x: jax.Array,  # [B, T, N, H]
        cache: NeighborCache | None,  # [B, 2, N, H]
        positions: jax.Array,  # [B or 1, T]
        mask: Mask,
    ) -> jax.Array:  # [B, T, N, H]
        """Return a weighted sum of each token and the two tokens before it, per channel.

        Without a causal mask: of the token and one neighbor on each side. Initially the token
        itself has weight 1/2 and each neighbor 1/6.
        """
        num_after = 0 if mask.pattern.causal else 1
        num_before = KERNEL_SIZE - 1 - num_after
        if cache is not None and num_after:
            raise ValueError("mixer primer: decoding with a cache needs a causal mask; give one")

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jnp.full(shape, 0.5 / KERNEL_SIZE, dtype).at[num_before].set(0.5)

        outputs = {"taps": KERNEL_SIZE, "heads": x.shape[2], "head": x.shape[3]}
        dtype = self.context.precision.parameters
        taps = declare_weight(self, f"{name}_taps", outputs=outputs, init=init, dtype=dtype)
        windows = neighbor_window(
            x, num_before, num_after, positions=positions, mask=mask, cache=cache
        )
        y = jnp.sum(windows * taps.astype(x.dtype)[None, None], axis=2)
        return self.context.constrain(y, ("batch", "length", "heads", None))
