"""Full softmax attention: multi-head, grouped-query, multi-query and cross, in one mixer."""

import dataclasses
from typing import Any, ClassVar, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer import scores
from transformer.attend import Case, Form, attend
from transformer.cache import KVCache, MemoryCache
from transformer.checks import check_choice, check_least, check_share
from transformer.dropout import fold
from transformer.hardware import Hardware
from transformer.linear import linear
from transformer.masks import Mask, Pattern
from transformer.mixers import MIXERS, NOTHING, Abilities, Mixer, MixerConfig, MixerOutput, Want
from transformer.norms import Norm, NormConfig
from transformer.positions import AttentionPosition, NoPosition, RelativePositions, Rotary, rotate
from transformer.relations import Relation, relation
from transformer.scores import AdditiveScore, ScaledDotScore, Score


@dataclasses.dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """Softmax attention: scaled dot-product unless said otherwise (Vaswani et al. 2017)."""

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
    score: Score = ScaledDotScore()
    """How well a key answers a query."""
    position: AttentionPosition = NoPosition()
    """What queries and keys know of each other's positions. A memory's are not known."""
    qk_norm: NormConfig | None = None
    """The norm of each head's queries and keys, before they meet (Dehghani et al. 2023)."""
    dropout: float = 0.0
    """Of the attention weights."""
    form: Form = "auto"
    """How it is computed; `auto` goes by hardware, dtype and mask."""

    def __post_init__(self) -> None:
        check_least("attention.heads", self.heads, 1)
        for name in ("kv_heads", "head_width", "value_width"):
            check_least(f"attention.{name}", getattr(self, name), 0)
        check_share("attention.dropout", self.dropout)
        check_choice("attention.form", self.form, get_args(Form))
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"attention.kv_heads {self.kv_heads}: does not divide heads {self.heads}; "
                "give a divisor of it"
            )
        of_products = isinstance(self.position, Rotary | RelativePositions)
        if of_products and isinstance(self.score, AdditiveScore):
            raise ValueError(
                f"attention.position {type(self.position).__name__}: works in products of queries "
                "and keys, not in an AdditiveScore; give ALiBi, BucketedBias or NoPosition"
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

    def meeting_width(self, width: int) -> int:
        """H of queries and keys where they meet, and of the keys that a cache keeps."""
        return scores.meeting_width(self.score, self.query_width(width))

    @property
    def products(self) -> bool:
        """Whether its scores are products of queries and keys alone."""
        added = not isinstance(self.position, NoPosition | Rotary)
        return not added and not isinstance(self.score, AdditiveScore)

    def case(
        self,
        width: int,  # D
        length: int,  # T, and S
        *,
        dtype: str,
        hardware: Hardware,
        causal: bool,
        segments: bool,
        cross: bool = False,
    ) -> Case:
        """What its form is chosen by, when nothing is decoded and no weights are wanted."""
        return Case(
            hardware=hardware,
            pattern=Pattern(causal=causal),
            dtype=dtype,
            queries=length,
            keys=length,
            query_width=self.meeting_width(width),
            value_width=self.value_width or self.query_width(width),
            segments=segments,
            own_keys=not cross,
            products=self.products,
            dropout=self.dropout > 0,
        )


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
        return KVCache(*self.empty(batch, length))

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryCache:
        return MemoryCache(*self.empty(batch, length))

    @nn.nowrap
    def empty(self, batch: int, length: int) -> tuple[jax.Array, jax.Array]:
        """Room for keys [B, S, K, H where they meet queries] and values [B, S, K, H of values]."""
        config, dtype = self.config, self.shared.precision.compute
        kv, _, v_width = self.sizes()
        k_width = config.meeting_width(self.shared.width)
        zeros = lambda width: jnp.zeros((batch, length, kv, width), dtype)  # noqa: E731
        return zeros(k_width), zeros(v_width)

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
        positions: jax.Array,  # [B or 1, T]
        mask: Mask,
        memory: jax.Array | None = None,  # [B, S, D]
        cache: KVCache | MemoryCache | None = None,
        keys: jax.Array | None = None,  # [B]
        constants: Any = None,
        want: Want = NOTHING,
    ) -> MixerOutput:
        """With a `MemoryCache`, the memory is projected once: later calls do without it."""
        config, shared = self.config, self.shared
        q, related = self.queries(x), Relation()
        if isinstance(cache, MemoryCache):
            cache = cache if memory is None else cache.write(*self.keys_and_values(memory))
            k, v = cache.keys, cache.values
        elif memory is not None:
            if cache is not None:
                raise ValueError("attention with a memory: give a cache of init_memory_cache")
            k, v = self.keys_and_values(memory)
        else:
            k, v = self.keys_and_values(x)
            q, k = self.turned(q, positions), self.turned(k, positions)
            if cache is not None:
                cache = cache.write(k, v, positions)
                k, v = cache.keys, cache.values
                mask = mask.over(cache.positions, holds_queries=True)
            related = self.related()
            if not config.products and mask.positions is None:
                mask = mask.replace(positions=positions)
        attended = attend(
            q,
            k,
            v,
            mask,
            form=config.form,
            hardware=shared.hardware,
            scale=scores.scale(config.score, q.shape[-1]),
            meet=scores.meet(self, config.score, config.heads, q.shape[-1], shared),
            bias=related.bias,
            relative=related.relative,
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

    def queries(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, N, H]
        """As they meet the keys, but not turned yet."""
        config, shared = self.config, self.shared
        embed, axes = {"embed": shared.width}, {"heads": config.heads, "head": self.sizes()[1]}
        q = linear(self, "query", x, embed, axes, shared, bias=config.bias)
        q = scores.map_queries(self, self.normed("query_norm", q), config.score, shared)
        return shared.constrain(q, ("batch", "length", "heads", None))

    def keys_and_values(
        self,
        source: jax.Array,  # [B, S, D]
    ) -> tuple[jax.Array, jax.Array]:  # [B, S, K, H], [B, S, K, H of values]
        """Keys as they meet the queries, but not turned yet."""
        config, shared = self.config, self.shared
        kv, k_width, v_width = self.sizes()
        embed, bias = {"embed": shared.width}, config.bias
        axes = {"kv_heads": kv, "head": k_width}
        k = linear(self, "key", source, embed, axes, shared, bias=bias)
        k = scores.map_keys(self, self.normed("key_norm", k), config.score, shared)
        axes = {"kv_heads": kv, "head": v_width}
        v = linear(self, "value", source, embed, axes, shared, bias=bias)
        names = ("batch", "length", "kv_heads", None)
        return shared.constrain(k, names), shared.constrain(v, names)

    def turned(
        self,
        x: jax.Array,  # [B, T, N, H]
        positions: jax.Array,  # [B or 1, T]
    ) -> jax.Array:  # [B, T, N, H]
        position = self.config.position
        return rotate(x, positions, position) if isinstance(position, Rotary) else x

    def normed(self, name: str, x: jax.Array) -> jax.Array:  # [B, T, N, H] -> [B, T, N, H]
        """Each head's entries normed, with one gain for all heads."""
        if self.config.qk_norm is None:
            return x
        return Norm(self.config.qk_norm, self.shared.precision, "head", name=name)(x)

    def related(self) -> Relation:
        """What the positions add to scores and values."""
        config, (_, q_width, v_width) = self.config, self.sizes()
        widths = dict(heads=config.heads, key_width=q_width, value_width=v_width)
        return relation(self, config.position, self.shared, **widths)


MIXERS[AttentionConfig.kind] = Attention
