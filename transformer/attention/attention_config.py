"""Settings of mixers, of attention heads and of full attention. Importing this loads no JAX."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from transformer.attention.position_config import (
    AttentionPosition,
    NoPosition,
    RelativePositions,
    RoPE,
)
from transformer.hardware import Hardware
from transformer.layers.layer_config import NormConfig
from transformer.validation import check_at_least, check_choice, check_field_types, check_fraction

if TYPE_CHECKING:  # choose.py imports JAX through masks.py
    from transformer.attention.backends.choose import AttentionSpec


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """Base class of the settings of every mixer."""

    kind: ClassVar[str]
    """Name of the mixer in `MIXERS`."""
    reads_memory: ClassVar[bool] = False
    """The mixer attends to the memory in addition to its own input (a recurrent decoder with
    attention inside). It takes the mixer's place in a block and is called with `memory`;
    `mask.segments` describes its own input and `mask.key_segments` the memory."""
    depends_on_row_index: ClassVar[bool] = False
    """The pattern depends on a token's index in its row, not only on its position in its document.
    Packed documents stay separate, but a packed document differs from the same document alone."""

    @property
    def ignores_padding(self) -> bool:
        """Whether rows of one document may be padded although the mixer lacks `segments`."""
        return False

    def check_d_model(self, d_model: int) -> None:
        """Raise ValueError if a model of width `d_model` cannot use this mixer."""


@dataclasses.dataclass(frozen=True)
class MultiHeadConfig(MixerConfig):
    """Settings that all mixers with attention heads share."""

    num_heads: int = 8
    """N, number of query heads."""
    num_kv_heads: int = 0
    """K, number of key and value heads: 0 or N for multi-head attention, 1 for multi-query
    (Shazeer 2019), a divisor of N in between for grouped-query (Ainslie et al. 2023)."""
    head_dim: int = 0
    """H, width of a query or key head. 0: D / N."""
    bias: bool = True
    """Add biases to the query, key, value and output projections."""
    output_bias: bool | None = None
    """Add a bias to the output projection. None: the same as `bias`. Qwen2 has biases only of
    queries, keys and values."""
    qk_norm: NormConfig | None = None
    """Norm of each query and key head before the scores (Dehghani et al. 2023). None: no norm."""

    def __post_init__(self) -> None:
        check_at_least("attention.num_heads", self.num_heads, 1)
        check_at_least("attention.num_kv_heads", self.num_kv_heads, 0)
        check_at_least("attention.head_dim", self.head_dim, 0)
        if self.num_heads % self.resolved_num_kv_heads:
            raise ValueError(
                f"attention.num_kv_heads {self.num_kv_heads}: does not divide num_heads "
                f"{self.num_heads}; give a divisor of it"
            )

    @property
    def ignores_padding(self) -> bool:
        """Whether rows of one document may be padded although the mixer lacks `segments`."""
        return False

    def check_d_model(self, d_model: int) -> None:
        self.resolved_head_dim(d_model)

    @property
    def has_output_bias(self) -> bool:
        """True if the output projection has a bias."""
        return self.bias if self.output_bias is None else self.output_bias

    @property
    def resolved_num_kv_heads(self) -> int:
        """K, with the default filled in."""
        return self.num_kv_heads or self.num_heads

    def resolved_head_dim(self, d_model: int) -> int:
        """Return H for a model of width D.

        Raises:
          ValueError: `head_dim` is 0 and N does not divide D.
        """
        if not self.head_dim and d_model % self.num_heads:
            raise ValueError(
                f"attention.num_heads {self.num_heads}: does not divide the width {d_model}; "
                "give a divisor of it, or set head_dim"
            )
        return self.head_dim or d_model // self.num_heads


@dataclasses.dataclass(frozen=True)
class SharedQueryKeyConfig(MultiHeadConfig):
    """Settings of mixers that use one projection for queries and keys, so that N = K."""

    position: NoPosition | RoPE = NoPosition()
    """Position information of queries and keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resolved_num_kv_heads != self.num_heads:
            raise ValueError(
                f"{self.kind}.num_kv_heads {self.num_kv_heads}: queries and keys are the same "
                "here, so both have num_heads; leave it at 0"
            )
        check_field_types(self, self.kind)
        if self.qk_norm is not None:
            raise ValueError(
                f"{self.kind}.qk_norm {self.qk_norm.kind}: this mixer normalizes its keys itself; "
                "leave it at None"
            )


@dataclasses.dataclass(frozen=True)
class ScaledDotScore:
    """q . k / sqrt(H), of unit variance if q and k are (Vaswani et al. 2017, section 3.2.1)."""

    divisor: float = 0.0
    """Width to take the root of in place of H (Gemma 2's `query_pre_attn_scalar`). 0: H."""

    def __post_init__(self) -> None:
        check_at_least("scaled_dot_score.divisor", self.divisor, 0)


@dataclasses.dataclass(frozen=True)
class DotScore:
    """q . k (Luong et al. 2015, equation 8, `dot`)."""


@dataclasses.dataclass(frozen=True)
class BilinearScore:
    """q W k with one matrix W per head (Luong et al. 2015, equation 8, `general`)."""


@dataclasses.dataclass(frozen=True)
class AdditiveScore:
    """w . tanh(W q + U k), one MLP per head (Bahdanau et al. 2015, appendix A.1.2)."""

    hidden_dim: int = 0
    """Width of the hidden layer. 0: the width of a query head."""

    def __post_init__(self) -> None:
        check_at_least("additive_score.hidden_dim", self.hidden_dim, 0)


AttentionScore = ScaledDotScore | DotScore | BilinearScore | AdditiveScore


def score_head_dim(score: AttentionScore, head_dim: int) -> int:
    """Return the width of transformed queries and keys, for heads of width `head_dim`."""
    return (score.hidden_dim or head_dim) if isinstance(score, AdditiveScore) else head_dim


Backend = Literal["auto", "reference", "query_blocks", "blockwise", "cudnn", "splash", "ring"]


@dataclasses.dataclass(frozen=True)
class AttentionConfig(MultiHeadConfig):
    """Full softmax attention, by default scaled dot-product (Vaswani et al. 2017)."""

    kind: ClassVar[str] = "full"

    value_head_dim: int = 0
    """Width of a value head. 0: that of a query head."""
    score: AttentionScore = ScaledDotScore()
    """Score of a query and a key."""
    position: AttentionPosition = NoPosition()
    """Position information of queries and keys. Cross attention ignores it."""
    soft_cap: float = 0.0
    """Soft cap c: c tanh(score / c) limits scores to (-c, c) (Gemma Team 2024, section 2). 0: no
    cap."""
    sinks: bool = False
    """Add one learned logit per head to the softmax, without a value: a query that matches no key
    can put its weight there (Agarwal et al. 2025, section 2.2)."""
    dropout: float = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""
    backend: Backend = "auto"
    """Implementation. `auto`: the fastest one that supports the hardware, the dtype and the mask.
    All compute the same result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("attention.value_head_dim", self.value_head_dim, 0)
        check_at_least("attention.soft_cap", self.soft_cap, 0)
        check_fraction("attention.dropout", self.dropout)
        check_choice("attention.backend", self.backend, get_args(Backend))
        needs_dot_product = isinstance(self.position, RoPE | RelativePositions)
        if needs_dot_product and isinstance(self.score, AdditiveScore):
            raise ValueError(
                f"attention.position {type(self.position).__name__}: needs scores that are dot "
                "products, and score is AdditiveScore; give ALiBi, T5RelativeBias or NoPosition"
            )

    def score_head_dim(self, d_model: int) -> int:
        """Return the width of transformed queries and keys; cached keys have it too."""
        return score_head_dim(self.score, self.resolved_head_dim(d_model))

    @functools.cached_property
    def dot_product_only(self) -> bool:
        """Return True if scores are dot products of queries and keys and nothing else."""
        return self._dot_product_before_cap and not self.soft_cap

    @property
    def _dot_product_before_cap(self) -> bool:
        """RoPE is part of the queries and keys, so it does not count as an addition."""
        adds_position_terms = not isinstance(self.position, NoPosition | RoPE)
        return not adds_position_terms and not isinstance(self.score, AdditiveScore)

    def attention_spec(
        self,
        d_model: int,  # D
        length: int,  # T = S
        *,
        dtype: str,
        hardware: Hardware,
        causal: bool,
        segments: bool,
        cross: bool = False,
        context_shards: int = 1,  # number of devices along the length
        mesh_known: bool = False,  # the layout of arrays on several devices is known
    ) -> AttentionSpec:
        """Return the properties that select the backend of a training step."""
        from transformer.attention.backends.choose import AttentionSpec
        from transformer.attention.masks import MaskPattern

        return AttentionSpec(
            hardware=hardware,
            pattern=MaskPattern(causal=causal),
            dtype=dtype,
            num_queries=length,
            num_keys=length,
            head_dim=self.score_head_dim(d_model),
            value_head_dim=self.value_head_dim or self.resolved_head_dim(d_model),
            has_segments=segments,
            # In a training step the keys of self-attention are the queries' own tokens, in their
            # order.
            keys_match_queries=not cross,
            dot_product_only=self.dot_product_only,
            soft_capped=self.soft_cap > 0 and self._dot_product_before_cap,
            has_relative_tables=isinstance(self.position, RelativePositions),
            has_sinks=self.sinks,
            has_dropout=self.dropout > 0,
            context_shards=context_shards,
            mesh_known=mesh_known,
        )
