"""Google's neural machine translation system (Wu et al. 2016) as an `EncoderDecoder`."""

from typing import Any

from transformer.block_config import BlockConfig
from transformer.config import EncoderConfig, TransformerConfig
from transformer.layer_configs import MixerConfig
from transformer.recurrent.configs import GNMTDecoderConfig, GNMTEncoderConfig


def gnmt_config(
    width: int = 1024,  # D
    *,
    num_layers: int = 8,  # of the encoder and of the decoder
    dropout: float = 0.2,
    **model_fields: Any,  # other fields of the configuration
) -> TransformerConfig:
    """Eight LSTM layers read, eight write, each side one mixer; as published unless told."""
    encoder = EncoderConfig(
        num_layers=1,
        layer_pattern=(_alone(GNMTEncoderConfig(num_layers, dropout)),),
        final_norm=None,
    )
    decoder = _alone(GNMTDecoderConfig(num_layers, dropout=dropout))
    given: dict[str, Any] = dict(final_norm=None, tied=False, encoder=encoder) | model_fields
    return TransformerConfig(d_model=width, num_layers=1, layer_pattern=(decoder,), **given)


def _alone(mixer: MixerConfig) -> BlockConfig:
    """A block that is its mixer and nothing else."""
    return BlockConfig(mixer=mixer, feed_forward=None, norm=None, residual=False)
