"""Primer attention: a depthwise convolution after each projection (So et al. 2021)."""

import dataclasses
import math
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from transformer.attention.attend import attend
from transformer.attention.cache import KVCache
from transformer.attention.masks import Mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.attention.position_bias import AttentionPosition, position_terms
from transformer.attention.reference import ScoreSpec
from transformer.attention.rope import RoPE, apply_rope
from transformer.attention.sparse_ops.local_window import NeighborCache, neighbor_window
from transformer.layers.basic import apply_linear, declare_weight, fold_in
from transformer.layers.position_embedding import NoPosition
from transformer.taps import ATTENTION_VALUES
from transformer.validation import Bounds, Fraction

KERNEL_SIZE = 3


@dataclasses.dataclass(frozen=True)
class PrimerConfig(MixerConfig):
    """Multi-DConv-head attention (So et al. 2021, section 4.2 and appendix A.3).

    Primer combines it with a squared-ReLU feed-forward.
    """

    kind: ClassVar[str] = "primer"

    num_heads: Annotated[int, Bounds(1, 2**16)] = 8
    """N, number of heads."""
    head_dim: Annotated[int, Bounds(0, 2**20)] = 0
    """H, width of a head. 0: D / N."""
    bias: bool = False
    """Add biases to the projections."""
    position: AttentionPosition = NoPosition()
    """Position information of queries and keys, applied after the convolution."""
    dropout: Fraction = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""

    def check_d_model(self, d_model: int) -> None:
        self.resolved_head_dim(d_model)

    def resolved_head_dim(self, d_model: int) -> int:
        """Return H for a model of width D.

        Raises:
          ValueError: `head_dim` is 0 and N does not divide D.
        """
        if not self.head_dim and d_model % self.num_heads:
            raise ValueError(
                f"PrimerConfig.num_heads {self.num_heads}: does not divide the width {d_model}; "
                "give a divisor of it, or set head_dim"
            )
        return self.head_dim or d_model // self.num_heads


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
        return cls(kv, (inputs, inputs, inputs))


@register_mixer
class Primer(Mixer):
    """Softmax attention over convolved queries, keys and values."""

    config: PrimerConfig
    values = ATTENTION_VALUES

    @staticmethod
    def abilities(config: PrimerConfig) -> Abilities:
        return Abilities(cross=False)

    @staticmethod
    def score_flops(config: PrimerConfig, width: int, length: int) -> ScoreFlops:
        per_key = 4 * config.num_heads * config.resolved_head_dim(width)
        return ScoreFlops(full=per_key * length, causal=per_key * (length + 1) // 2)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> PrimerCache:
        config, context = self.config, self.context
        head_dim = config.resolved_head_dim(context.d_model)
        dtype = context.precision.cache_dtype
        return PrimerCache.empty(batch, length, config.num_heads, head_dim, dtype)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        mask, cache, positions = inputs.mask, inputs.cache, inputs.positions
        if cache is not None and not mask.pattern.causal:
            raise ValueError("mixer primer: decoding with a cache needs a causal mask; give one")
        head_dim = config.resolved_head_dim(context.d_model)
        heads = {"heads": config.num_heads, "head": head_dim}
        embed = {"embed": context.d_model}

        names = ("query", "key", "value")
        projected = [
            apply_linear(self, name, x, embed, heads, context, bias=config.bias) for name in names
        ]
        previous = (None, None, None) if cache is None else cache.conv_inputs
        q, k, v = (
            self.depthwise_convolution(name, conv_input, conv_cache, positions, mask)
            for name, conv_input, conv_cache in zip(names, projected, previous, strict=True)
        )
        # RoPE after the convolution: weights per channel do not commute with rotations of channel
        # pairs, so in the other order scores would depend on absolute positions.
        if isinstance(config.position, RoPE):
            q = apply_rope(q, positions, config.position)
            k = apply_rope(k, positions, config.position)
        if cache is not None:
            kv = cache.kv.append(k, v, positions)
            conv_inputs = [
                conv_cache.append(conv_input, positions)
                for conv_cache, conv_input in zip(cache.conv_inputs, projected, strict=True)
            ]
            cache = PrimerCache(kv, tuple(conv_inputs))
            k, v, key_positions = kv.read(q.dtype)
            mask = mask.with_keys(key_positions, keys_include_queries=True)

        terms = position_terms(
            self,
            config.position,
            context,
            num_heads=config.num_heads,
            key_head_dim=head_dim,
            value_head_dim=head_dim,
            shared_bias=inputs.shared_bias,
        )
        score_spec = ScoreSpec(
            scale=1 / math.sqrt(head_dim),
            bias=terms.bias,
            relative_tables=terms.relative_tables,
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
            self, "output", attended.y, heads, embed, context, bias=config.bias, residual=True
        )
        return MixerOutput(y, cache, attended.aux)

    def depthwise_convolution(
        self,
        name: str,
        x: Float[Array, "B T N H"],
        cache: NeighborCache | None,  # [B, 2, N, H]
        positions: Int[Array, "#B T"],
        mask: Mask,
    ) -> Float[Array, "B T N H"]:
        """Return a weighted sum of each token and the two tokens before it, per channel.

        Without a causal mask: of the token and one neighbor on each side. Initially the token
        itself has weight 1/2 and each neighbor 1/6.
        """
        num_after = 0 if mask.pattern.causal else 1
        num_before = KERNEL_SIZE - 1 - num_after

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
