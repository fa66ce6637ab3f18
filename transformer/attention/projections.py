"""Attention heads: settings, and linear maps to queries, keys and values (with RoPE), and back.

Every attention mixer uses them with the same parameter names, so the weights of one fit another.
"""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer.attention.cache import MemoryCache
from transformer.attention.mixer import Mixer, MixerConfig, MixerInputs, MixerOutput
from transformer.attention.rope import RoPE, apply_rope
from transformer.attention.scores import (
    SCALED_DOT,
    AdditiveScore,
    AttentionScore,
    BilinearScore,
    transform_keys,
    transform_queries,
)
from transformer.layers.basic import apply_linear
from transformer.layers.norms import Norm, NormConfig
from transformer.layers.position_embedding import NO_POSITION, NoPosition
from transformer.validation import Bounds, Mark, NonNegativeFloat

HeadNorms = Literal["shared", "separate", "joint"]


@dataclasses.dataclass(frozen=True)
class MultiHeadConfig(MixerConfig):
    """Settings that all mixers with attention heads share."""

    num_heads: Annotated[int, Bounds(1, 2**16), Mark.COMMON] = 8
    """N, number of query heads."""
    num_kv_heads: Annotated[int, Bounds(0, 2**16)] = 0
    """K, number of key and value heads: 0 or N for multi-head attention, 1 for multi-query
    (Shazeer 2019), a divisor of N in between for grouped-query (Ainslie et al. 2023)."""
    head_dim: Annotated[int, Bounds(0, 2**20)] = 0
    """H, width of a query or key head. 0: D / N."""
    bias: bool = True
    """Add biases to the query, key, value and output projections."""
    output_bias: bool | None = None
    """Add a bias to the output projection. None: the same as `bias`. Qwen2 has biases only of
    queries, keys and values."""
    qk_norm: NormConfig | None = None
    """Norm of each query and key head before the scores (Dehghani et al. 2023). None: no norm."""
    qk_norm_heads: HeadNorms = "shared"
    """`shared`: each head is normalized by itself, and all have the same gain [H] (Qwen3).
    `separate`: each head has a gain of its own (Cohere's Command R+, StableLM 2). `joint`: all
    heads are normalized as one vector of N H or K H entries (OLMo 2, Walsh et al. 2025)."""
    qkv_clip: NonNegativeFloat = 0.0
    """c: clip projected queries, keys and values to [-c, c], before `qk_norm` (MPT: MosaicML 2023;
    OLMo: Groeneveld et al. 2024). 0: no clipping."""
    position: NoPosition | RoPE = NO_POSITION
    """Position information of queries and keys, as they are projected: before a feature map, or a
    projection of the length. Cross attention ignores it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.resolved_num_kv_heads:
            raise ValueError(
                f"{type(self).__name__}.num_kv_heads {self.num_kv_heads}: does not divide "
                f"num_heads {self.num_heads}; give a divisor of it"
            )
        if self.qk_norm is None and self.qk_norm_heads != "shared":
            raise ValueError(
                f"{type(self).__name__}.qk_norm_heads {self.qk_norm_heads}: there is no norm of "
                "queries and keys; give qk_norm, or leave it at shared"
            )

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
                f"{type(self).__name__}.num_heads {self.num_heads}: does not divide the width "
                f"{d_model}; give a divisor of it, or set head_dim"
            )
        return self.head_dim or d_model // self.num_heads


@dataclasses.dataclass(frozen=True)
class SharedQueryKeyConfig(MultiHeadConfig):
    """Settings of mixers that use one projection for queries and keys, so that N = K."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resolved_num_kv_heads != self.num_heads:
            raise ValueError(
                f"{type(self).__name__}.num_kv_heads {self.num_kv_heads}: queries and keys are the "
                "same here, so both have num_heads; leave it at 0"
            )
        if self.qk_norm is not None:
            raise ValueError(
                f"{type(self).__name__}.qk_norm {self.qk_norm.kind}: this mixer normalizes its "
                "keys itself; leave it at None"
            )


class QKV(NamedTuple):
    """Queries, keys and values, ready for the scores."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K Hv"]


def project_qkv(
    mixer: Mixer,
    x: Float[Array, "B T D"],
    positions: Int[Array, "#B T"],
    *,
    score: AttentionScore = SCALED_DOT,
    value_head_dim: int = 0,  # 0: that of a query head
    suffix: str = "",  # of the parameter names
) -> QKV:
    """Project queries, keys and values of self-attention, and apply RoPE if the mixer has it.

    Like all projections here, it declares weights of a mixer with a `MultiHeadConfig`.
    """
    q = project_queries(mixer, x, score=score, suffix=suffix)
    k = project_keys(mixer, x, score=score, suffix=suffix)
    v = project_values(mixer, x, value_head_dim=value_head_dim, suffix=suffix)
    position = mixer.config.position
    if isinstance(position, RoPE):
        q = apply_rope(q, positions, position)
        k = apply_rope(k, positions, position)
    return QKV(q, k, v)


def project_queries(
    mixer: Mixer,
    x: Float[Array, "B T D"],
    *,
    score: AttentionScore = SCALED_DOT,
    suffix: str = "",
) -> Float[Array, "B T N H"]:
    """Project and normalize queries and apply the score's query map, without RoPE."""
    config, context = mixer.config, mixer.context
    axes = {"heads": config.num_heads, "head": config.resolved_head_dim(context.d_model)}
    q = _project_heads(mixer, f"query{suffix}", x, axes, config.qk_norm)
    if isinstance(score, BilinearScore | AdditiveScore):
        q = transform_queries(mixer, q, score, context)
    return q


def project_keys(
    mixer: Mixer,
    x: Float[Array, "B S D"],
    *,
    score: AttentionScore = SCALED_DOT,
    suffix: str = "",
) -> Float[Array, "B S K H"]:
    """Project and normalize keys and apply the score's key map, without RoPE."""
    config, context = mixer.config, mixer.context
    head_dim = config.resolved_head_dim(context.d_model)
    axes = {"kv_heads": config.resolved_num_kv_heads, "head": head_dim}
    k = _project_heads(mixer, f"key{suffix}", x, axes, config.qk_norm)
    if isinstance(score, AdditiveScore):
        k = transform_keys(mixer, k, score, context)
    return k


def project_values(
    mixer: Mixer,
    x: Float[Array, "B S D"],
    *,
    value_head_dim: int = 0,
    suffix: str = "",
) -> Float[Array, "B S K Hv"]:
    """Project values."""
    config = mixer.config
    head_dim = value_head_dim or config.resolved_head_dim(mixer.context.d_model)
    axes = {"kv_heads": config.resolved_num_kv_heads, "head": head_dim}
    return _project_heads(mixer, f"value{suffix}", x, axes, norm=None)


def project_memory(
    mixer: Mixer,
    memory: Float[Array, "B S D"] | None,  # None: read the cache
    cache: Any,
    dtype: Any,  # of the computation; the cache may store another
    *,
    score: AttentionScore = SCALED_DOT,
    value_head_dim: int = 0,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"], MemoryCache | None]:
    """Return keys and values of the memory without RoPE, and the cache that holds them.

    They are the same for all tokens of the decoder, so decoding projects them once.

    Raises:
      ValueError: If the cache is not one for a memory.
    """
    if not isinstance(cache, MemoryCache | None):
        raise ValueError(
            "cache: is not one for a memory; give the cache that init_memory_cache returns"
        )
    if memory is not None:
        k = project_keys(mixer, memory, score=score)
        v = project_values(mixer, memory, value_head_dim=value_head_dim)
        if cache is None:
            return k, v, None
        # The keys of this call are read from the cache too, rounded as those of later tokens will
        # be.
        cache = cache.append(k, v)
    assert cache is not None
    cached = cache.read(dtype)
    return cached.keys, cached.values, cache


def project_output(mixer: Mixer, y: Float[Array, "B T N Hv"]) -> Float[Array, "B T D"]:
    """Map the concatenated heads to the model's width."""
    context = mixer.context
    return apply_linear(
        mixer,
        "output",
        y,
        {"heads": y.shape[2], "head": y.shape[3]},
        {"embed": context.d_model},
        context,
        bias=mixer.config.has_output_bias,
        residual=True,
    )


def _project_heads(
    mixer: Mixer,
    name: str,
    x: Float[Array, "B T D"],
    axes: dict[str, int],  # of the heads, then of their width
    norm: NormConfig | None,
) -> Float[Array, "B T heads H"]:
    """Project x to heads, clip them and apply a norm to them."""
    config, context = mixer.config, mixer.context
    embed = {"embed": context.d_model}
    heads = apply_linear(mixer, name, x, embed, axes, context, bias=config.bias)
    heads = context.constrain(heads, ("batch", "length", next(iter(axes)), None))
    if config.qkv_clip:
        heads = jnp.clip(heads, -config.qkv_clip, config.qkv_clip)
    if norm is None:
        return heads
    gain_axes = ("head",) if config.qk_norm_heads == "shared" else tuple(axes)
    joint = config.qk_norm_heads == "joint"
    return Norm(norm, context, gain_axes, joint, parent=mixer, name=f"{name}_norm")(heads)


def combine_heads(
    mixer: Mixer,
    y: Float[Array, "B T N Hv"],
    inputs: MixerInputs,
    cache: Any = None,
    aux: dict[str, Any] | None = None,
) -> MixerOutput:
    """Show the heads to `inputs.taps`, project them, and return the output of the mixer.

    Args:
      mixer: It has the weights `output`, whose settings are those of `project_output`.
      y: Outputs of its heads.
      inputs: The mixer's inputs.
      cache: Cache to return.
      aux: Other extra outputs to return.
    """
    aux = dict(aux or {})
    if inputs.taps is not None:
        y = inputs.taps.visit("head_outputs", y, aux)
    return MixerOutput(project_output(mixer, y), cache, aux)
