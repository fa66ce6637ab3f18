"""Convolution over neighbouring tokens (Kalchbrenner et al. 2016; Gehring et al. 2017)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.layer_configs import ConvolutionConfig as ConvolutionConfig
from transformer.linear import apply_linear
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.refusals import reject_mask_patterns, reject_memory, reject_weights
from transformer.shifts import neighbor_window, update_history
from transformer.weights import Initialization, declare_weight


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
        shape = (batch, self.config.kernel_size - 1, self.context.d_model)
        return jnp.zeros(shape, self.context.precision.compute)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, shared = self.config, self.context
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        ahead = 0 if inputs.mask.pattern.causal else (config.kernel_size - 1) // 2
        if inputs.cache is not None and not inputs.mask.pattern.causal:
            raise ValueError("mixer convolution: decodes under a causal mask alone; give one")
        behind = config.kernel_size - 1 - ahead
        seen = neighbor_window(
            x, behind, ahead, positions=inputs.positions, mask=inputs.mask, history=inputs.cache
        )
        after = None if inputs.cache is None else update_history(inputs.cache, x, inputs.positions)
        embed, hidden = {"embed": shared.d_model}, {"hidden": shared.d_model}
        if config.separable:
            mixed = self.depthwise_convolution(seen)
            y = apply_linear(self, "output", mixed, embed, hidden, shared, bias=True, residual=True)
        else:
            taps = {"taps": config.kernel_size, **embed}
            y = apply_linear(self, "kernel", seen, taps, hidden, shared, bias=True, residual=True)
        return MixerOutput(y, after, {})

    def depthwise_convolution(self, seen: jax.Array) -> jax.Array:  # [B, T, k, D] -> [B, T, D]
        """A weighted sum over the taps, each channel with weights of its own."""
        taps, dtype = {"taps": self.config.kernel_size}, self.context.precision.parameters
        outputs = {**taps, "embed": self.context.d_model}  # no matrix: channels do not meet
        init = Initialization(std=0.0).matrix_initializer(taps)
        depthwise = declare_weight(self, "depthwise", outputs=outputs, init=init, dtype=dtype)
        return jnp.sum(seen * depthwise.astype(seen.dtype)[None, None], axis=2)


MIXERS[ConvolutionConfig.kind] = Convolution
