"""Full softmax attention: multi-head, grouped-query, multi-query and cross, in one mixer."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
from flax import linen as nn

from transformer.attend import Form, attend
from transformer.cache import KVCache
from transformer.dropout import fold
from transformer.linear import linear
from transformer.masks import Mask
from transformer.mixers import MIXERS, NOTHING, Abilities, Mixer, MixerConfig, MixerOutput, Want
from transformer.positions import AttentionPosition, NoPosition, Rotary, rotate


@dataclasses.dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2)."""

    kind: ClassVar[str] = "full"

    heads: int = 8
    """N, heads of the queries."""
    kv_heads: int = 0
    """K, heads of keys and values: N is multi-head (0 means N), 1 multi-query (Shazeer 2019),
    between them grouped-query (Ainslie et al. 2023)."""
    head_width: int = 0
    """H of queries and keys; 0 means D / N."""
    value_width: int = 0
    """H of values; 0 means that of queries."""
    bias: bool = True
    """Biases of the query, key, value and output projections."""
    position: AttentionPosition = NoPosition()
    """What turns queries and keys by their positions."""
    dropout: float = 0.0
    """Of the attention weights."""
    form: Form = "auto"
    """How it is computed; `auto` goes by hardware, dtype and mask."""

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"attention.heads {self.heads}: give 1 or more")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"attention.kv_heads {self.kv_heads}: does not divide heads {self.heads}; "
                "give a divisor of it"
            )

    def check(self, width: int) -> None:
        self.query_width(width)

    def query_width(self, width: int) -> int:
        """H for a model of width D. Raises ValueError if D / N is needed and is no integer."""
        if not self.head_width and width % self.heads:
            raise ValueError(
                f"attention.heads {self.heads}: does not divide the width {width}; "
                "give a divisor of it, or set head_width"
            )
        return self.head_width or width // self.heads


class Attention(Mixer):
    """y = concat over heads of softmax(q k^T / sqrt(H)) v, times the output matrix."""

    config: AttentionConfig

    @staticmethod
    def abilities(config: AttentionConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def constants(config: AttentionConfig, layer: int, width: int) -> None:
        return None

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        kv, q_width, v_width = self.sizes()
        dtype = self.shared.precision.compute
        zeros = jax.numpy.zeros
        return KVCache(
            keys=zeros((batch, length, kv, q_width), dtype),
            values=zeros((batch, length, kv, v_width), dtype),
        )

    @nn.nowrap
    def sizes(self) -> tuple[int, int, int]:
        """K, H of queries and keys, H of values."""
        q_width = self.config.query_width(self.shared.width)
        return (
            self.config.kv_heads or self.config.heads,
            q_width,
            self.config.value_width or q_width,
        )

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array,  # [B, T]
        mask: Mask,
        memory: jax.Array | None = None,  # [B, S, D]
        cache: KVCache | None = None,
        keys: jax.Array | None = None,  # [B]
        constants: Any = None,
        want: Want = NOTHING,
    ) -> MixerOutput:
        config, shared = self.config, self.shared
        q, k, v = self.project(x, x if memory is None else memory)
        if isinstance(config.position, Rotary) and memory is None:
            q, k = (rotate(each, positions, config.position) for each in (q, k))
        if cache is not None:
            cache = cache.write(k, v, positions)
            k, v = cache.keys, cache.values
            mask = mask.over(cache.positions)
        attended = attend(
            q,
            k,
            v,
            mask,
            form=config.form,
            hardware=shared.hardware,
            scale=1 / math.sqrt(q.shape[-1]),
            softmax_dtype=shared.precision.softmax,
            rate=config.dropout,
            keys=fold(keys, 0),
            want=want,
        )
        inputs = {"heads": q.shape[2], "head": v.shape[-1]}
        outputs = {"embed": shared.width}
        y = linear(
            self, "output", attended.y, inputs, outputs, shared, bias=config.bias, residual=True
        )
        return MixerOutput(y, cache, attended.aux)

    def project(
        self,
        x: jax.Array,  # [B, T, D]
        source: jax.Array,  # [B, S, D]
    ) -> tuple[
        jax.Array, jax.Array, jax.Array
    ]:  # [B, T, N, H], [B, S, K, H], [B, S, K, H of values]
        """Queries of x, keys and values of the source."""
        config, shared = self.config, self.shared
        kv, q_width, v_width = self.sizes()
        embed, bias = {"embed": shared.width}, config.bias
        q_axes = {"heads": config.heads, "head": q_width}
        q = linear(self, "query", x, embed, q_axes, shared, bias=bias)
        k_axes = {"kv_heads": kv, "head": q_width}
        k = linear(self, "key", source, embed, k_axes, shared, bias=bias)
        v_axes = {"kv_heads": kv, "head": v_width}
        v = linear(self, "value", source, embed, v_axes, shared, bias=bias)
        return (
            shared.constrain(q, ("batch", "length", "heads", None)),
            shared.constrain(k, ("batch", "length", "kv_heads", None)),
            shared.constrain(v, ("batch", "length", "kv_heads", None)),
        )


MIXERS[AttentionConfig.kind] = Attention
