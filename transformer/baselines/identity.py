"""Identity mixer: no information moves between tokens, as in bag-of-embeddings models."""

import dataclasses
from typing import ClassVar

import jax
from flax import linen as nn

from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerConfig,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
)


@dataclasses.dataclass(frozen=True)
class IdentityConfig(MixerConfig):
    """y = x: no information moves between tokens. Used by bag-of-embeddings models."""

    kind: ClassVar[str] = "identity"


@register_mixer
class Identity(Mixer):
    """Mixer that returns its input."""

    config: IdentityConfig

    @staticmethod
    def abilities(config: IdentityConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def score_flops(config: IdentityConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> tuple[()]:
        """Return a cache without arrays: nothing is remembered."""
        return ()

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        return MixerOutput(x, inputs.cache, {})
