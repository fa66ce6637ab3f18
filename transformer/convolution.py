"""Convolution over neighbouring tokens (Kalchbrenner et al. 2016; Gehring et al. 2017)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.layer_configs import ConvolutionConfig as ConvolutionConfig
from transformer.linear import linear
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.refusals import refuse_memory, refuse_patterns, refuse_weights
from transformer.shifts import around, remembered
from transformer.weights import Initialization, weight


class Convolution(Mixer):
    """Local, and parallel over all tokens: 2 k D^2 operations for each."""

    config: ConvolutionConfig

    @staticmethod
    def abilities(config: ConvolutionConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: ConvolutionConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: ConvolutionConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> jax.Array:  # [B, k - 1, D]
        shape = (batch, self.config.taps - 1, self.shared.width)
        return jnp.zeros(shape, self.shared.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, shared = self.config, self.shared
        refuse_memory(config.kind, inputs.memory)
        refuse_weights(config.kind, inputs.outputs)
        refuse_patterns(config.kind, inputs.mask)
        ahead = 0 if inputs.mask.pattern.causal else (config.taps - 1) // 2
        if inputs.cache is not None and not inputs.mask.pattern.causal:
            raise ValueError("mixer convolution: decodes under a causal mask alone; give one")
        behind = config.taps - 1 - ahead
        seen = around(
            x, behind, ahead, positions=inputs.positions, mask=inputs.mask, past=inputs.cache
        )
        after = None if inputs.cache is None else remembered(inputs.cache, x, inputs.positions)
        embed, hidden = {"embed": shared.width}, {"hidden": shared.width}
        if config.separable:
            mixed = self.by_channel(seen)
            y = linear(self, "output", mixed, embed, hidden, shared, bias=True, residual=True)
        else:
            taps = {"taps": config.taps, **embed}
            y = linear(self, "kernel", seen, taps, hidden, shared, bias=True, residual=True)
        return MixerOutput(y, after, {})

    def by_channel(self, seen: jax.Array) -> jax.Array:  # [B, T, k, D] -> [B, T, D]
        """A weighted sum over the taps, each channel with weights of its own."""
        taps, dtype = {"taps": self.config.taps}, self.shared.precision.parameters
        outputs = {**taps, "embed": self.shared.width}  # no matrix: channels do not meet
        init = Initialization(std=0.0).matrix(taps)
        depthwise = weight(self, "depthwise", outputs=outputs, init=init, dtype=dtype)
        return jnp.sum(seen * depthwise.astype(seen.dtype)[None, None], axis=2)


MIXERS[ConvolutionConfig.kind] = Convolution
