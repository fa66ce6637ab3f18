"""The mixer that mixes nothing: every token is left to itself."""

from typing import Any

import jax
from flax import linen as nn

from transformer.layer_configs import IdentityConfig as IdentityConfig
from transformer.masks import Mask
from transformer.mixers import MIXERS, NOTHING, Abilities, Mixer, MixerOutput, Want
from transformer.refusals import refuse_memory, refuse_weights


class Identity(Mixer):
    """What a bag of embeddings has in place of attention."""

    config: IdentityConfig

    @staticmethod
    def abilities(config: IdentityConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: IdentityConfig, layer: int, width: int) -> None:
        return None

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> tuple[()]:
        return ()

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array,  # [B, T]
        mask: Mask,
        memory: jax.Array | None = None,
        cache: tuple[()] | None = None,
        keys: jax.Array | None = None,
        constants: Any = None,
        want: Want = NOTHING,
    ) -> MixerOutput:
        refuse_memory(self.config.kind, memory)
        refuse_weights(self.config.kind, want)
        return MixerOutput(x, cache, {})


MIXERS[IdentityConfig.kind] = Identity
