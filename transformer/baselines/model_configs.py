"""Settings of whole models of the time before transformers: a bag of embeddings, and GNMT."""

import dataclasses
from typing import Any

from transformer.attention.mixer import MixerConfig
from transformer.baselines.gnmt import GNMTDecoderConfig, GNMTEncoderConfig
from transformer.baselines.identity import IdentityConfig
from transformer.layers.feedforward import FeedForwardConfig
from transformer.models.block import BlockConfig
from transformer.models.config import EncoderConfig, TransformerConfig


def bag_of_embeddings_config(
    width: int,  # D
    hidden: int,  # F
    *,
    num_layers: int = 1,
    dropout: float = 0.0,  # of the hidden activations
    embedding_dropout: float = 0.0,
    **model_fields: Any,  # other fields of the config
) -> TransformerConfig:
    """Return an embedding and an MLP per token, for `Classifier(config, pooling="mean")`.

    The order of the tokens has no effect. The deep averaging network of Iyyer et al. 2015 takes
    the mean before the MLP instead.
    """
    mlp = FeedForwardConfig(d_ff=hidden, activation="relu", dropout=dropout)
    # No residual: the MLP's output takes the place of the embedding.
    block = BlockConfig(mixer=IdentityConfig(), feed_forward=mlp, norm=None, residual=False)
    config = TransformerConfig(
        d_model=width,
        num_layers=num_layers,
        layer_pattern=(block,),
        final_norm=None,
        causal=False,
        embedding_dropout=embedding_dropout,
    )
    return dataclasses.replace(config, **model_fields)


def gnmt_config(
    width: int = 1024,  # D
    *,
    num_layers: int = 8,  # of the encoder and of the decoder
    dropout: float = 0.2,
    **model_fields: Any,  # other fields of the config
) -> TransformerConfig:
    """Return Google's neural machine translation model (Wu et al. 2016).

    Encoder and decoder are one mixer each, with `num_layers` LSTM layers inside.
    """
    encoder = EncoderConfig(
        num_layers=1,
        layer_pattern=(_mixer_only(GNMTEncoderConfig(num_layers, dropout)),),
        final_norm=None,
    )
    # Residuals and dropout are inside the mixer, between its LSTM layers.
    decoder = _mixer_only(GNMTDecoderConfig(num_layers, dropout=dropout))
    config = TransformerConfig(
        d_model=width,
        num_layers=1,
        layer_pattern=(decoder,),
        final_norm=None,
        tie_embeddings=False,
        encoder=encoder,
    )
    return dataclasses.replace(config, **model_fields)


def _mixer_only(mixer: MixerConfig) -> BlockConfig:
    """Return a block without feed-forward, norm or residual."""
    return BlockConfig(mixer=mixer, feed_forward=None, norm=None, residual=False)
