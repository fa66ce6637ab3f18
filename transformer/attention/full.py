"""Full softmax attention: multi-head, grouped-query, multi-query and cross attention.

    q, k, v = W_q x, W_k x, W_v x     per head; keys and values come from the memory if there is one
    y = W_o concat over heads of softmax(score(q, k) under the mask) v

With `output_gate` the heads are multiplied by sigmoid(W_g x) before W_o.

Projections and RoPE are in `projections.py`, the softmax in `attend.py`, scores with weights and
sinks in `scores.py`, terms of the positions in `position_bias.py`.
"""

import dataclasses
from typing import Annotated, ClassVar

import jax
from flax import linen as nn

from transformer.attention.attend import attend
from transformer.attention.backends.choose import AttentionSpec, Backend
from transformer.attention.cache import KVCache, MemoryCache
from transformer.attention.masks import MaskPattern
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)
from transformer.attention.position_bias import AttentionPosition, RelativePositions, position_terms
from transformer.attention.projections import (
    MultiHeadConfig,
    project_memory,
    project_output,
    project_qkv,
    project_queries,
)
from transformer.attention.reference import ScoreSpec
from transformer.attention.rope import RoPE
from transformer.attention.scores import (
    SCALED_DOT,
    AdditiveScore,
    AttentionScore,
    declare_sink_logits,
    make_additive_score_fn,
)
from transformer.hardware import Hardware
from transformer.layers.basic import apply_linear, fold_in
from transformer.layers.position_embedding import NoPosition
from transformer.taps import ATTENTION_VALUES
from transformer.validation import Bounds, Fraction, NonNegativeFloat


@dataclasses.dataclass(frozen=True)
class AttentionConfig(MultiHeadConfig):
    """Full softmax attention, by default scaled dot-product (Vaswani et al. 2017)."""

    kind: ClassVar[str] = "full"

    value_head_dim: Annotated[int, Bounds(0, 2**20)] = 0
    """Width of a value head. 0: that of a query head."""
    score: AttentionScore = SCALED_DOT
    """Score of a query and a key."""
    position: AttentionPosition = NoPosition()  # type: ignore[assignment]  # more kinds
    """Position information of queries and keys. Cross attention ignores it."""
    soft_cap: NonNegativeFloat = 0.0
    """Soft cap c: c tanh(score / c) limits scores to (-c, c) (Gemma Team 2024, section 2). 0: no
    cap."""
    sinks: bool = False
    """Add one learned logit per head to the softmax, without a value: a query that matches no key
    can put its weight there (Agarwal et al. 2025, section 2.2)."""
    output_gate: bool = False
    """Multiply the heads' outputs by sigmoid(W_g x), one gate for each entry (Qiu et al. 2025;
    Qwen3-Next)."""
    dropout: Fraction = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""
    backend: Backend = "auto"
    """Implementation. `auto`: the fastest one that supports the hardware, the dtype and the mask.
    All compute the same result."""

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_dot_product = isinstance(self.position, RoPE | RelativePositions)
        if needs_dot_product and isinstance(self.score, AdditiveScore):
            raise ValueError(
                f"AttentionConfig.position {type(self.position).__name__}: needs scores that are "
                "dot products, and score is AdditiveScore; give ALiBi, T5RelativeBias or NoPosition"
            )

    def score_head_dim(self, d_model: int) -> int:
        """Return the width of transformed queries and keys; cached keys have it too."""
        return self.score.width(self.resolved_head_dim(d_model))

    def resolved_value_head_dim(self, d_model: int) -> int:
        """Return the width of a value head, with the default filled in."""
        return self.value_head_dim or self.resolved_head_dim(d_model)

    @property
    def is_dot_product(self) -> bool:
        """True if scores are dot products of queries and keys, perhaps with a soft cap."""
        # RoPE is part of the queries and keys, so it does not count as an addition.
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
        return AttentionSpec(
            hardware=hardware,
            pattern=MaskPattern(causal=causal),
            dtype=dtype,
            num_queries=length,
            num_keys=length,
            head_dim=self.score_head_dim(d_model),
            value_head_dim=self.resolved_value_head_dim(d_model),
            has_segments=segments,
            # In a training step the keys of self-attention are the queries' own tokens, in their
            # order.
            keys_match_queries=not cross,
            is_dot_product=self.is_dot_product,
            has_soft_cap=self.soft_cap > 0,
            has_relative_tables=isinstance(self.position, RelativePositions),
            has_sinks=self.sinks,
            has_dropout=self.dropout > 0,
            context_shards=context_shards,
            mesh_known=mesh_known,
        )


@register_mixer
class Attention(Mixer):
    """Mixer `full`: softmax attention over all keys that the mask shows."""

    config: AttentionConfig
    values = ATTENTION_VALUES

    @staticmethod
    def abilities(config: AttentionConfig) -> Abilities:
        return Abilities()

    @staticmethod
    def score_flops(config: AttentionConfig, width: int, length: int) -> ScoreFlops:
        """Return FLOPs per token of products between activations.

        An additive score counts as one product of its hidden layer and a vector for each key.
        """
        head_dims = config.score_head_dim(width) + config.resolved_value_head_dim(width)
        # Multiplications.
        per_key = config.num_heads * head_dims
        per_query = 0
        if isinstance(config.position, RelativePositions):
            num_distances = config.position.num_distances
            per_key += config.num_heads * 2 * num_distances
            per_query = config.num_heads * head_dims * num_distances
        return ScoreFlops(
            full=2 * (per_key * length + per_query),
            causal=per_key * (length + 1) + 2 * per_query,
        )

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> KVCache:
        config, d_model = self.config, self.context.d_model
        return KVCache.empty(
            batch,
            length,
            num_kv_heads=config.resolved_num_kv_heads,
            head_dim=config.score_head_dim(d_model),
            dtype=self.context.precision.cache_dtype,
            value_head_dim=config.resolved_value_head_dim(d_model),
        )

    @nn.nowrap
    def init_memory_cache(self, batch: int, length: int) -> MemoryCache:
        cache = self.init_cache(batch, length)
        return MemoryCache(cache.keys, cache.values)

    # Linen derives a weight's initial value from the number of weights declared before it, so the
    # order of the declarations below is part of the parameter layout: projections of q, k and v,
    # terms of the scores, sinks, output gate, output.

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        mask, cache = inputs.mask, inputs.cache
        score = config.score
        value_head_dim = config.resolved_value_head_dim(context.d_model)

        is_cross = inputs.memory is not None or isinstance(cache, MemoryCache)
        if is_cross:
            # No RoPE: the positions of x and of the memory are those of two sequences.
            q = project_queries(self, x, score=score)
            k, v, cache = project_memory(
                self,
                inputs.memory,
                cache,
                q.dtype,
                score=score,
                value_head_dim=value_head_dim,
            )
        else:
            q, k, v = project_qkv(
                self,
                x,
                inputs.positions,
                score=score,
                value_head_dim=value_head_dim,
            )
            if cache is not None:
                # Keys are cached after RoPE: each is rotated once, by its own position.
                cache = cache.append(k, v, inputs.positions)
                k, v, key_positions = cache.read(q.dtype)
                mask = mask.with_keys(key_positions, keys_include_queries=True)

        rngs = inputs.dropout_rngs if config.dropout else None
        score_spec = ScoreSpec(
            scale=score.scale(q.shape[-1]),
            soft_cap=config.soft_cap,
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(rngs, 0),
        )
        # Positions are those of one sequence: between a memory and x, a distance means nothing.
        if not is_cross and not isinstance(config.position, NoPosition | RoPE):
            terms = position_terms(
                self,
                config.position,
                context,
                num_heads=config.num_heads,
                key_head_dim=config.resolved_head_dim(context.d_model),
                value_head_dim=value_head_dim,
                shared_bias=inputs.shared_bias,
            )
            score_spec = score_spec._replace(bias=terms.bias, relative_tables=terms.relative_tables)
            # A mask may leave positions out (they count from 0); the terms need the real ones.
            if mask.positions is None:
                mask = mask.replace(positions=inputs.positions)
        if isinstance(score, AdditiveScore):
            score_fn = make_additive_score_fn(self, config.num_heads, q.shape[-1], context)
            score_spec = score_spec._replace(score_fn=score_fn)

        sink_logits = None
        if config.sinks:
            sink_logits = declare_sink_logits(self, config.num_heads, context)
        attended = attend(
            q,
            k,
            v,
            mask,
            score_spec,
            sink_logits=sink_logits,
            backend=config.backend,
            hardware=context.hardware,
            constrain=context.constrain,
            outputs=inputs.outputs,
            taps=inputs.taps,
        )
        y = attended.y
        if config.output_gate:
            heads = {"heads": y.shape[2], "head": y.shape[3]}
            embed = {"embed": context.d_model}
            gate = apply_linear(self, "output_gate", x, embed, heads, context, bias=config.bias)
            y = y * jax.nn.sigmoid(gate)
        return MixerOutput(project_output(self, y), cache, attended.aux)
