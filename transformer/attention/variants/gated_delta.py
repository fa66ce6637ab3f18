"""Gated DeltaNet: a state that decays, and that is corrected at each key (Yang et al. 2024).

For each of N heads, with q, k and v after a causal depthwise convolution and SiLU, and q and k of
length 1 (arXiv:2412.06464, equation 10 and section 3.4):

    b = sigmoid(W_b x)                             strength of the correction
    a = exp(-A softplus(W_a x + dt_bias))          decay
    S = a S + k (b (v - a S^T k))^T
    y = W_o concat over heads of RMSNorm(S^T q / sqrt(H)) * silu(W_g x)

The heads, decays and norms are those of Qwen3-Next, which has fewer queries and keys than values.
"""

import dataclasses
import math
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.document_boundaries import document_boundaries
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
)
from transformer.attention.projections import combine_heads
from transformer.attention.variants.gated_recurrence import (
    RecurrentState,
    declare_steps,
    log_rate_initializer,
    project_heads,
    scan_chunks,
)
from transformer.layers.basic import apply_linear
from transformer.layers.norms import Norm, NormConfig
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import Bounds, Mark, NonNegativeFloat

NORM_EPSILON = 1e-6
"""Added to the squared lengths of queries and keys."""


@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig(MixerConfig):
    """Gated DeltaNet (Yang et al. 2024), a recurrence with N states [H, Hv].

    It is causal with or without a causal mask, and knows the order of tokens without positions.
    """

    kind: ClassVar[str] = "gated_delta"
    has_output_bias: ClassVar[bool] = False

    num_heads: Annotated[int, Bounds(1, 2**16), Mark.COMMON] = 8
    """N, number of value heads, each with a state, a decay and a gate."""
    num_key_heads: Annotated[int, Bounds(0, 2**16)] = 0
    """K, number of query and key heads, a divisor of N. 0: N."""
    head_dim: Annotated[int, Bounds(0, 2**20)] = 0
    """H, width of a query or key head. 0: D / N."""
    value_head_dim: Annotated[int, Bounds(0, 2**20)] = 0
    """Hv, width of a value head. 0: H."""
    kernel_size: Annotated[int, Bounds(1, 2**16)] = 4
    """Number of taps of the convolutions, including the token itself."""
    norm_epsilon: NonNegativeFloat = 1e-5
    """Added to the mean square of a head's output before the square root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.resolved_num_key_heads:
            raise ValueError(
                f"GatedDeltaConfig.num_key_heads {self.num_key_heads}: does not divide num_heads "
                f"{self.num_heads}; give a divisor of it"
            )

    def check_d_model(self, d_model: int) -> None:
        self.resolved_head_dim(d_model)

    @property
    def resolved_num_key_heads(self) -> int:
        """K, with the default filled in."""
        return self.num_key_heads or self.num_heads

    def resolved_head_dim(self, d_model: int) -> int:
        """Return H for a model of width D.

        Raises:
          ValueError: `head_dim` is 0 and N does not divide D.
        """
        if not self.head_dim and d_model % self.num_heads:
            raise ValueError(
                f"GatedDeltaConfig.num_heads {self.num_heads}: does not divide the width "
                f"{d_model}; give a divisor of it, or set head_dim"
            )
        return self.head_dim or d_model // self.num_heads

    def resolved_value_head_dim(self, d_model: int) -> int:
        """Return Hv for a model of width D."""
        return self.value_head_dim or self.resolved_head_dim(d_model)


@register_mixer
class GatedDelta(Mixer):
    """Gated delta rule: forward in chunks of tokens, decoding token by token from the state."""

    config: GatedDeltaConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: GatedDeltaConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def score_flops(config: GatedDeltaConfig, width: int, length: int) -> ScoreFlops:
        """Count FLOPs of reading a state with k and q and of writing to it; independent of T."""
        state = config.resolved_head_dim(width) * config.resolved_value_head_dim(width)
        flops = 2 * 3 * config.num_heads * state
        return ScoreFlops(full=flops, causal=flops)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> RecurrentState:
        config, context = self.config, self.context
        return RecurrentState.empty(
            batch,
            config.kernel_size,
            query=(config.resolved_num_key_heads, config.resolved_head_dim(context.d_model)),
            value=(config.num_heads, config.resolved_value_head_dim(context.d_model)),
            dtype=context.precision.cache_dtype,
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context, cache = self.config, self.context, inputs.cache
        reject_mask_patterns(config.kind, inputs.mask)
        embed = {"embed": context.d_model}
        num_key_heads = config.resolved_num_key_heads
        head_dim = config.resolved_head_dim(context.d_model)
        query = {"kv_heads": num_key_heads, "head": head_dim}
        value = {
            "heads": config.num_heads,
            "head": config.resolved_value_head_dim(context.d_model),
        }
        # Of each value head: those of one key head stand together, as in the files of Qwen3-Next.
        scalars = {"kv_heads": num_key_heads, "group": config.num_heads // num_key_heads}

        q, k, v, conv_inputs = project_heads(self, x, inputs, query, value)
        gate = apply_linear(self, "output_gate", x, embed, value, context, bias=False)
        beta = apply_linear(self, "beta", x, embed, scalars, context, bias=False)
        decay = apply_linear(self, "decay", x, embed, scalars, context, bias=False)

        # A from 0 to 16 in the paper's code; a rate of 0 has no logarithm.
        _, log_decay = declare_steps(self, decay, scalars, log_rate_initializer(0.01, 16.0))
        y, state = scan_chunks(
            unit_length(q) / math.sqrt(head_dim),
            unit_length(k),
            v,
            log_decay.reshape(*x.shape[:2], -1),
            jax.nn.sigmoid(beta.astype(jnp.float32)).reshape(*x.shape[:2], -1),
            document_boundaries(inputs.mask, inputs.positions, cached=cache is not None),
            None if cache is None else cache.state,
        )
        if conv_inputs is not None:
            cache = RecurrentState(state, conv_inputs)
        norm = NormConfig("rms", epsilon=config.norm_epsilon)
        y = Norm(norm, context, ("head",), name="norm")(y)
        y = (y * jax.nn.silu(gate.astype(y.dtype))).astype(x.dtype)
        y = context.constrain(y, ("batch", "length", "heads", None))
        return combine_heads(self, y, inputs, cache)


def unit_length(x: jax.Array) -> jax.Array:  # [..., H]
    """Return x in float32, divided by its length."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPSILON)
