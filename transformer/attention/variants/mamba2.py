"""Mamba-2: a selective state-space model as linear attention with decays (Dao and Gu 2024).

By state-space duality (arXiv:2405.21060, sections 3 and 7) the input x of the recurrence is a
value, B is a key and C a query, which the N heads of one of G groups share. For each head, with x,
B and C after a causal depthwise convolution and SiLU:

    step = softplus(W_s u + dt_bias)
    S = exp(-A step) S + B (step x)^T
    y = W_o (RMSNorm((S^T C + skip x) * silu(W_g u)))     the norm over the heads of a group

where u is the input of the layer. A block of Mamba-2 has no feed-forward:
`BlockConfig(mixer=Mamba2Config(), feed_forward=None, norm=NormConfig("rms"))`.
"""

import dataclasses
from typing import Annotated, ClassVar

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Float32

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
from transformer.layers.basic import apply_linear, declare_weight
from transformer.layers.norms import inverse_rms
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import Bounds, Mark, NonNegativeFloat

EXPANSION = 2
"""Width of all heads together over D, by default."""


@dataclasses.dataclass(frozen=True)
class Mamba2Config(MixerConfig):
    """Mamba-2 (Dao and Gu 2024), a recurrence with N states [state_dim, H].

    It is causal with or without a causal mask, and knows the order of tokens without positions.
    """

    kind: ClassVar[str] = "mamba2"

    num_heads: Annotated[int, Bounds(1, 2**16), Mark.COMMON] = 8
    """N, number of heads, each with a state and a decay."""
    head_dim: Annotated[int, Bounds(0, 2**20)] = 0
    """H, width of a head; 64 in the paper. 0: 2 D / N."""
    state_dim: Annotated[int, Bounds(1, 2**20)] = 128
    """Rows of a state: the width of B and C, the keys and queries."""
    num_groups: Annotated[int, Bounds(1, 2**16)] = 1
    """G, number of keys and queries, and of norms of the output; a divisor of N."""
    kernel_size: Annotated[int, Bounds(1, 2**16)] = 4
    """Number of taps of the convolutions, including the token itself."""
    conv_bias: bool = True
    """Add biases after the convolutions."""
    bias: bool = False
    """Add biases to all projections."""
    norm_epsilon: NonNegativeFloat = 1e-5
    """Added to the mean square of a group's output before the square root."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"Mamba2Config.num_groups {self.num_groups}: does not divide num_heads "
                f"{self.num_heads}; give a divisor of it"
            )

    def check_d_model(self, d_model: int) -> None:
        self.resolved_head_dim(d_model)

    @property
    def has_output_bias(self) -> bool:
        """True if the output projection has a bias."""
        return self.bias

    def resolved_head_dim(self, d_model: int) -> int:
        """Return H for a model of width D.

        Raises:
          ValueError: `head_dim` is 0 and N does not divide 2 D.
        """
        if not self.head_dim and EXPANSION * d_model % self.num_heads:
            raise ValueError(
                f"Mamba2Config.num_heads {self.num_heads}: does not divide twice the width "
                f"{d_model}; give a divisor of it, or set head_dim"
            )
        return self.head_dim or EXPANSION * d_model // self.num_heads


@register_mixer
class Mamba2(Mixer):
    """State-space duality: forward in chunks of tokens, decoding token by token from the state."""

    config: Mamba2Config
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: Mamba2Config) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def score_flops(config: Mamba2Config, width: int, length: int) -> ScoreFlops:
        """Count FLOPs of writing to the states and of reading them; independent of T."""
        flops = 2 * 2 * config.num_heads * config.state_dim * config.resolved_head_dim(width)
        return ScoreFlops(full=flops, causal=flops)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> RecurrentState:
        config, context = self.config, self.context
        return RecurrentState.empty(
            batch,
            config.kernel_size,
            query=(config.num_groups, config.state_dim),
            value=(config.num_heads, config.resolved_head_dim(context.d_model)),
            dtype=context.precision.cache_dtype,
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context, cache = self.config, self.context, inputs.cache
        reject_mask_patterns(config.kind, inputs.mask)
        embed = {"embed": context.d_model}
        heads = {"heads": config.num_heads}
        value = heads | {"head": config.resolved_head_dim(context.d_model)}
        query = {"kv_heads": config.num_groups, "head": config.state_dim}

        q, k, v, conv_inputs = project_heads(
            self, x, inputs, query, value, bias=config.bias, conv_bias=config.conv_bias
        )
        gate = apply_linear(self, "output_gate", x, embed, value, context, bias=config.bias)
        # Not "dt": its bias would have the name of the bias that `declare_steps` adds.
        step = apply_linear(self, "step", x, embed, heads, context, bias=config.bias)

        step, log_decay = declare_steps(self, step, heads, log_rate_initializer(1.0, 16.0))
        v = v.astype(step.dtype)
        y, state = scan_chunks(
            q,
            k,
            v * step[..., None],
            log_decay,
            None,
            document_boundaries(inputs.mask, inputs.positions, cached=cache is not None),
            None if cache is None else cache.state,
        )
        if conv_inputs is not None:
            cache = RecurrentState(state, conv_inputs)
        skip = declare_weight(
            self,
            "skip",
            outputs=heads,
            init=nn.initializers.ones,
            dtype=context.precision.parameters,
        )
        y = y + v * skip.astype(v.dtype)[None, None, :, None]
        y = self.normalize(y * jax.nn.silu(gate.astype(y.dtype))).astype(x.dtype)
        y = context.constrain(y, ("batch", "length", "heads", None))
        return combine_heads(self, y, inputs, cache)

    def normalize(self, y: Float32[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Apply RMSNorm to the heads of each group together."""
        precision, axes = self.context.precision, {"heads": y.shape[2], "head": y.shape[3]}
        init, dtype = nn.initializers.ones, precision.parameters
        gain = declare_weight(self, "norm_gain", outputs=axes, init=init, dtype=dtype)
        y = y.astype(precision.norm)
        groups = y.reshape(*y.shape[:2], self.config.num_groups, -1)
        groups = groups * inverse_rms(groups, self.config.norm_epsilon)
        return groups.reshape(y.shape) * gain.astype(y.dtype)[None, None]
