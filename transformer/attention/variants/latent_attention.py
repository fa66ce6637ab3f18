"""Multi-head latent attention (DeepSeek-AI 2024a, DeepSeek-V2, section 2.1; 2024b, V3).

Keys and values of all heads are linear maps of one latent of each token, and positions are in a
key of their own, which all heads share:

    c = norm(W_dkv x)                                latent, of `kv_rank` entries
    k = [W_uk c, rope(W_kr x)]   v = W_uv c          per head; the rotated part is the same in all
    q = [W_uq c', rope(W_qr c')]                     c' = norm(W_dq x), or x itself
    y = W_o concat over heads of softmax(q k^T / sqrt(width of q)) v

Training and long prompts compute k and v. Decoding needs neither (section 2.1.2): W_uk moves to the
query and W_uv behind the sum, so that all heads attend to the latents themselves:

    q k^T = [W_uk^T q_nope, q_rope] [c, k_rope]^T    sum of weights * v = W_uv (sum of weights * c)
"""

import dataclasses
import math
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from transformer.attention.attend import attend
from transformer.attention.backends.choose import Backend
from transformer.attention.cache import write_at_positions
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.attention.reference import ScoreSpec
from transformer.attention.rope import RoPE, YaRNScaling, apply_rope
from transformer.layers.basic import apply_linear, apply_matrix, declare_linear, fold_in
from transformer.layers.low_rank import merge_weight
from transformer.layers.norms import Norm, NormConfig
from transformer.layers.position_embedding import NoPosition
from transformer.taps import ATTENTION_VALUES
from transformer.validation import Bounds, Fraction, Mark


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig(MixerConfig):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    kind: ClassVar[str] = "latent"

    num_heads: Annotated[int, Bounds(1, 2**16), Mark.COMMON] = 8
    """N, number of heads."""
    kv_rank: Annotated[int, Bounds(0, 2**20)] = 0
    """R, width of the latent that keys and values are made of. 0: 4 `nope_head_dim`, as in V2."""
    query_rank: Annotated[int, Bounds(0, 2**20)] = 0
    """Width of a latent that queries are made of. 0: queries are projected from the input."""
    nope_head_dim: Annotated[int, Bounds(0, 2**20)] = 0
    """Width of the part of a query or key head without a position. 0: D / N."""
    rope_head_dim: Annotated[int, Bounds(0, 2**20)] = 0
    """Width, even, of the part of a query head that is rotated, and of the shared rotated key.
    0: half of `nope_head_dim`."""
    value_head_dim: Annotated[int, Bounds(0, 2**20)] = 0
    """Width of a value head. 0: `nope_head_dim`."""
    bias: bool = False
    """Add biases to the maps from the input to latents and to the shared key, and to the output
    projection."""
    norm: NormConfig = NormConfig("rms", epsilon=1e-6)
    """Norm of the latents."""
    position: NoPosition | RoPE = RoPE()
    """Position information of the part of `rope_head_dim` entries. DeepSeek has the layout
    `interleaved`."""
    dropout: Fraction = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""
    backend: Backend = "auto"
    """Implementation of the attention over expanded keys, as in `full`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_head_dim % 2:
            raise ValueError(
                f"LatentAttentionConfig.rope_head_dim {self.rope_head_dim}: is odd, and RoPE "
                "rotates pairs; give an even width"
            )
        if isinstance(self.position, RoPE) and self.position.fraction != 1:
            raise ValueError(
                f"LatentAttentionConfig.position RoPE with fraction {self.position.fraction}: the "
                "rotated part has a width of its own; leave it at 1, and set rope_head_dim"
            )

    def check_d_model(self, d_model: int) -> None:
        self.resolve(d_model)

    def resolve(self, d_model: int) -> "LatentAttentionConfig":
        """Return the settings with the defaults of all widths filled in.

        Raises:
          ValueError: `nope_head_dim` is 0 and N does not divide D.
        """
        if not self.nope_head_dim and d_model % self.num_heads:
            raise ValueError(
                f"LatentAttentionConfig.num_heads {self.num_heads}: does not divide the width "
                f"{d_model}; give a divisor of it, or set nope_head_dim"
            )
        nope = self.nope_head_dim or d_model // self.num_heads
        return dataclasses.replace(
            self,
            kv_rank=self.kv_rank or 4 * nope,
            nope_head_dim=nope,
            rope_head_dim=self.rope_head_dim or max(2, nope // 4 * 2),
            value_head_dim=self.value_head_dim or nope,
        )

    @property
    def query_head_dim(self) -> int:
        """Width of a query or key head, once the widths are resolved."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def score_scale(self) -> float:
        """Factor of the scores: 1 / sqrt(width of a head), times that of YaRN."""
        scaling = self.position.scaling if isinstance(self.position, RoPE) else None
        factor = scaling.score_factor if isinstance(scaling, YaRNScaling) else 1.0
        return factor / math.sqrt(self.query_head_dim)

    def absorbs(self, num_queries: Any) -> bool:
        """Return True if queries of a cache take fewer multiplications with absorbed projections.

        Per key and head, expanded keys cost R (nope + value) once and a query their widths; with
        absorbed projections a query costs the width of what the cache holds, twice.
        """
        if not isinstance(num_queries, int):  # symbolic
            return False
        expansion = self.kv_rank * (self.nope_head_dim + self.value_head_dim)
        expanded = self.query_head_dim + self.value_head_dim
        absorbed = 2 * (self.kv_rank + self.rope_head_dim)
        return num_queries * (absorbed - expanded) < expansion


class LatentCache(struct.PyTreeNode):
    """Latents, after their norm, and rotated shared keys of all tokens of one layer.

    Both stand side by side: absorbed projections attend to them as to one key head. Slot s holds
    the token at position s, as in `KVCache`.
    """

    latents: Float[Array, "B S R_plus_H"]

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        length: int,  # S
        width: int,  # R + H of the shared key
        dtype: Any,
    ) -> "LatentCache":
        """Return a cache with room for `length` tokens of each example."""
        return cls(jnp.zeros((batch_size, length, width), dtype))

    def append(
        self,
        latents: Float[Array, "B T R_plus_H"],
        positions: Int[Array, "#B T"],  # consecutive in each row
    ) -> "LatentCache":
        """Return the cache with T more tokens, written at their positions.

        Raises:
          ValueError: Positions that are not traced lie beyond the cache.
        """
        return LatentCache(write_at_positions(self.latents, latents, positions))

    def read(self, dtype: Any) -> Float[Array, "B S R_plus_H"]:
        """Return all S slots in `dtype`."""
        return self.latents.astype(dtype)

    @property
    def positions(self) -> Int[Array, "1 S"]:
        """Position of each slot, the same in all examples."""
        return jnp.arange(self.latents.shape[1])[None, :]


@register_mixer
class LatentAttention(Mixer):
    """Mixer `latent`: softmax attention whose keys and values are maps of one latent per token."""

    config: LatentAttentionConfig
    values = ATTENTION_VALUES

    @staticmethod
    def abilities(config: LatentAttentionConfig) -> Abilities:
        return Abilities(cross=False)

    @staticmethod
    def score_flops(config: LatentAttentionConfig, width: int, length: int) -> ScoreFlops:
        """Return FLOPs per token with expanded keys and values."""
        config = config.resolve(width)
        per_key = 2 * config.num_heads * (config.query_head_dim + config.value_head_dim)
        return ScoreFlops(full=per_key * length, causal=per_key * (length + 1) // 2)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> LatentCache:
        config = self.config.resolve(self.context.d_model)
        width = config.kv_rank + config.rope_head_dim
        return LatentCache.empty(batch, length, width, self.context.precision.cache_dtype)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        context = self.context
        config = self.config.resolve(context.d_model)
        mask, cache, rank = inputs.mask, inputs.cache, config.kv_rank
        # Linen derives initial values from the order of declaration.
        q_nope, q_rope = self.project_queries(x, inputs.positions)
        latents = self.project_latents(x, inputs.positions)
        latent, heads = {"latent": rank}, {"heads": config.num_heads}
        to_keys, _ = declare_linear(
            self, "key", latent, heads | {"head": config.nope_head_dim}, context, bias=False
        )
        to_values, _ = declare_linear(
            self, "value", latent, heads | {"head": config.value_head_dim}, context, bias=False
        )
        if cache is not None:
            cache = cache.append(latents, inputs.positions)
            latents = cache.read(x.dtype)
            mask = mask.with_keys(cache.positions, keys_include_queries=True)
        # Taps show the queries, keys and values of the definition.
        absorbs = cache is not None and inputs.taps is None and config.absorbs(x.shape[1])
        if absorbs:
            q_nope = jnp.einsum("BTNH,RNH->BTNR", q_nope, merge_weight(to_keys))
            # Values are the whole keys, and what is not of the latent is cut off the result: a
            # slice of the cache would be copied for every token.
            k = v = latents[:, :, None]
        else:
            shared_key = latents[:, :, None, rank:]
            latents = latents[..., :rank]
            k = apply_matrix(latents, to_keys, 1, context.flatten_tokens)
            v = apply_matrix(latents, to_values, 1, context.flatten_tokens)
            shared_key = jnp.broadcast_to(shared_key, (*k.shape[:3], config.rope_head_dim))
            k = self.constrain_heads(jnp.concatenate([k, shared_key], axis=-1))
            v = self.constrain_heads(v)
        attended = attend(
            self.constrain_heads(jnp.concatenate([q_nope, q_rope], axis=-1)),
            k,
            v,
            mask,
            ScoreSpec(
                scale=config.score_scale,
                softmax_dtype=context.precision.softmax,
                dropout_rate=config.dropout,
                dropout_rngs=fold_in(inputs.dropout_rngs if config.dropout else None, 0),
            ),
            backend="auto" if absorbs else config.backend,
            hardware=context.hardware,
            constrain=context.constrain,
            outputs=inputs.outputs,
            taps=inputs.taps,
        )
        y = attended.y
        if absorbs:
            y = jnp.einsum("BTNR,RNH->BTNH", y[..., :rank], merge_weight(to_values))
        y = apply_linear(
            self,
            "output",
            y,
            heads | {"head": config.value_head_dim},
            {"embed": context.d_model},
            context,
            bias=config.bias,
            residual=True,
        )
        return MixerOutput(y, cache, attended.aux)

    def project_queries(
        self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]
    ) -> tuple[Float[Array, "B T N Hn"], Float[Array, "B T N Hr"]]:
        """Return both parts of the queries, the second rotated."""
        context = self.context
        config = self.config.resolve(context.d_model)
        axes = {"embed": context.d_model}
        if config.query_rank:
            latent = {"query_latent": config.query_rank}
            x = apply_linear(self, "query_latent", x, axes, latent, context, bias=config.bias)
            x = Norm(config.norm, context, ("query_latent",), name="query_latent_norm")(x)
            axes = latent
        heads = {"heads": config.num_heads, "head": config.query_head_dim}
        q = apply_linear(self, "query", x, axes, heads, context, bias=False)
        nope, rope = q[..., : config.nope_head_dim], q[..., config.nope_head_dim :]
        if isinstance(config.position, RoPE):
            rope = apply_rope(rope, positions, config.position)
        return nope, rope

    def project_latents(
        self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]
    ) -> Float[Array, "B T R_plus_H"]:
        """Return the normalized latent of each token and its rotated shared key, side by side."""
        context = self.context
        config = self.config.resolve(context.d_model)
        embed, latent = {"embed": context.d_model}, {"latent": config.kv_rank}
        c = apply_linear(self, "latent", x, embed, latent, context, bias=config.bias)
        c = Norm(config.norm, context, ("latent",), name="latent_norm")(c)
        head = {"head": config.rope_head_dim}
        key = apply_linear(self, "rope_key", x, embed, head, context, bias=config.bias)
        if isinstance(config.position, RoPE):
            key = apply_rope(key[:, :, None], positions, config.position)[:, :, 0]
        return jnp.concatenate([c, key], axis=-1)

    def constrain_heads(self, heads: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Return the heads, split over devices as those of all attention are."""
        return self.context.constrain(heads, ("batch", "length", "heads", None))
