"""Bag of embeddings: a text classifier that ignores word order."""

from typing import Any

import jax
from flax import linen as nn

from transformer.attention.base import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    reject_memory,
    reject_weights,
)
from transformer.baselines.config import IdentityConfig
from transformer.config import BlockConfig, TransformerConfig
from transformer.layers.config import FeedForwardConfig
from transformer.registry import MIXERS


class Identity(Mixer):
    """Mixer that returns its input."""

    config: IdentityConfig

    @staticmethod
    def abilities(config: IdentityConfig) -> Abilities:
        return Abilities(cross=False, weights=False)

    @staticmethod
    def constants(config: IdentityConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: IdentityConfig, width: int, length: int) -> ScoreFlops:
        return ScoreFlops(full=0, causal=0)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> tuple[()]:
        return ()

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        reject_memory(self.config.kind, inputs.memory)
        reject_weights(self.config.kind, inputs.outputs)
        return MixerOutput(x, inputs.cache, {})


MIXERS[IdentityConfig.kind] = Identity


def bag_of_embeddings_config(
    width: int,  # D
    hidden: int,  # F
    *,
    num_layers: int = 1,
    dropout: float = 0.0,  # of the hidden activations
    embedding_dropout: float = 0.0,
    **model_fields: Any,  # other fields of the configuration
) -> TransformerConfig:
    """Return the configuration of an embedding, an MLP and a mean, for `Classifier`.

    Use `Classifier(config, pooling="mean")`. The order of tokens has no effect. The deep averaging
    network of Iyyer et al. 2015 is similar but takes the mean before the MLP.
    """
    mlp = FeedForwardConfig(d_ff=hidden, activation="relu", dropout=dropout)
    block = BlockConfig(mixer=IdentityConfig(), feed_forward=mlp, norm=None, residual=False)
    given: dict[str, Any] = (
        dict(final_norm=None, causal=False, embedding_dropout=embedding_dropout) | model_fields
    )
    return TransformerConfig(d_model=width, num_layers=num_layers, layer_pattern=(block,), **given)
