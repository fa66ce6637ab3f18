"""Convolution over neighboring tokens (Kalchbrenner et al. 2016; Gehring et al. 2017)."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.base import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    reject_mask_patterns,
    reject_memory,
    reject_weights,
)
from transformer.attention.masks import Mask
from transformer.attention.token_segments import token_segments
from transformer.baselines.config import ConvolutionConfig
from transformer.config import Initialization
from transformer.layers.basic import apply_linear, declare_weight
from transformer.registry import MIXERS


def neighbor_window(
    x: jax.Array,  # [B, T, ...]
    num_before: int,
    num_after: int,
    *,
    positions: jax.Array,  # [B or 1, T]
    mask: Mask,
    history: jax.Array | None = None,  # [B, behind, ...] the inputs before; None: there are none
) -> jax.Array:  # [B, T, behind + 1 + ahead, ...] in the order of the row
    """Stack each token with its neighbors of the same document; zeros elsewhere."""
    length, taps = x.shape[1], num_before + 1 + num_after
    before = (
        jnp.zeros((x.shape[0], num_before, *x.shape[2:]), x.dtype) if history is None else history
    )
    after = jnp.zeros((x.shape[0], num_after, *x.shape[2:]), x.dtype)
    found = _windows(jnp.concatenate([before, x, after], axis=1), length, taps)
    seen = None
    if history is not None:  # what came before position 0 is of another document
        seen = positions[:, :, None] - num_before + jnp.arange(taps)[None, None, :] >= 0
    elif (segments := token_segments(mask, length)) is not None:
        theirs = _windows(jnp.pad(segments, ((0, 0), (num_before, num_after))), length, taps)
        seen = (theirs == segments[:, :, None]) & (theirs != 0)
    if seen is None:
        return found
    return jnp.where(seen.reshape(seen.shape + (1,) * (found.ndim - 3)), found, 0)


def _windows(row: jax.Array, length: int, taps: int) -> jax.Array:
    """Stack shifted copies of a row: [B, T + taps - 1, ...] -> [B, T, taps, ...]."""
    return jnp.stack([row[:, tap : tap + length] for tap in range(taps)], axis=2)


def update_history(
    history: jax.Array,  # [B, behind, ...]
    x: jax.Array,  # [B, T, ...]
    positions: jax.Array,  # [B, T] -1 for padding, which stands last
) -> jax.Array:  # [B, behind, ...]
    """Return the last inputs of each row, for the next call."""

    def last(row: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(row, count, history.shape[1])

    row = jnp.concatenate([history, x.astype(history.dtype)], axis=1)
    real = jnp.broadcast_to(positions >= 0, x.shape[:2])
    return jax.vmap(last)(row, jnp.sum(real, axis=1))


class Convolution(Mixer):
    """Convolution of kernel size k, parallel over tokens: 2 k D^2 FLOPs per token."""

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
        config, context = self.config, self.context
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
        embed, hidden = {"embed": context.d_model}, {"hidden": context.d_model}
        if config.separable:
            mixed = self.depthwise_convolution(seen)
            y = apply_linear(
                self, "output", mixed, embed, hidden, context, bias=True, residual=True
            )
        else:
            taps = {"taps": config.kernel_size, **embed}
            y = apply_linear(self, "kernel", seen, taps, hidden, context, bias=True, residual=True)
        return MixerOutput(y, after, {})

    def depthwise_convolution(self, seen: jax.Array) -> jax.Array:  # [B, T, k, D] -> [B, T, D]
        """Sum over the taps, with separate weights for each channel."""
        taps, dtype = {"taps": self.config.kernel_size}, self.context.precision.parameters
        outputs = {**taps, "embed": self.context.d_model}  # no matrix: channels do not meet
        init = Initialization(std=0.0).matrix_initializer(taps)
        depthwise = declare_weight(self, "depthwise", outputs=outputs, init=init, dtype=dtype)
        return jnp.sum(seen * depthwise.astype(seen.dtype)[None, None], axis=2)


MIXERS[ConvolutionConfig.kind] = Convolution
