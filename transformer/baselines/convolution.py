"""Convolution over neighboring tokens (Kalchbrenner et al. 2016; Gehring et al. 2017)."""

import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

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
from transformer.attention.sparse_ops.local_window import NeighborCache, neighbor_window
from transformer.layers.basic import apply_linear, declare_weight
from transformer.model_context import Initialization
from transformer.validation import Bounds


@dataclasses.dataclass(frozen=True)
class ConvolutionConfig(MixerConfig):
    """1-D convolution over the tokens of a document: y_t = sum_i W_i x_(t + i).

    Taps lie at i <= 0 under a causal mask and are centered otherwise. The cache holds the last
    k - 1 inputs.
    """

    kind: ClassVar[str] = "convolution"

    kernel_size: Annotated[int, Bounds(1, 2**16)] = 3
    """k, number of taps, including the token itself."""
    separable: bool = False
    """Depthwise separable convolution (Kaiser et al. 2017): one weight per tap and channel,
    followed by one D x D matrix. k D + D^2 weights instead of k D^2."""


@register_mixer
class Convolution(Mixer):
    """Convolution of kernel size k, parallel over tokens: 2 k D^2 FLOPs per token."""

    config: ConvolutionConfig

    @staticmethod
    def abilities(config: ConvolutionConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def score_flops(config: ConvolutionConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> NeighborCache:
        size, channels = self.config.kernel_size - 1, (self.context.d_model,)
        return NeighborCache.empty(batch, size, channels, self.context.precision.cache_dtype)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context, cache = self.config, self.context, inputs.cache
        reject_mask_patterns(config.kind, inputs.mask)
        num_after = 0 if inputs.mask.pattern.causal else (config.kernel_size - 1) // 2
        if cache is not None and not inputs.mask.pattern.causal:
            raise ValueError(
                "mixer convolution: decoding with a cache needs a causal mask; give one"
            )
        num_before = config.kernel_size - 1 - num_after
        windows = neighbor_window(
            x, num_before, num_after, positions=inputs.positions, mask=inputs.mask, cache=cache
        )
        if cache is not None:
            cache = cache.append(x, inputs.positions)
        embed, hidden = {"embed": context.d_model}, {"hidden": context.d_model}
        if config.separable:
            name, summands = "output", embed
            windows = self.depthwise_convolution(windows)
        else:
            name, summands = "kernel", {"taps": config.kernel_size, **embed}
        y = apply_linear(self, name, windows, summands, hidden, context, bias=True, residual=True)
        return MixerOutput(y, cache, {})

    def depthwise_convolution(self, windows: Float[Array, "B T k D"]) -> Float[Array, "B T D"]:
        """Sum over the taps, with separate weights for each channel."""
        taps, dtype = {"taps": self.config.kernel_size}, self.context.precision.parameters
        outputs = {**taps, "embed": self.context.d_model}  # no matrix: channels do not meet
        init = Initialization(std=0.0).matrix_initializer(taps)
        depthwise = declare_weight(self, "depthwise", outputs=outputs, init=init, dtype=dtype)
        return jnp.sum(windows * depthwise.astype(windows.dtype)[None, None], axis=2)
