"""Recurrent mixers: the systems that transformers replaced."""

from transformer.recurrent.configs import (
    BahdanauConfig,
    ChengConfig,
    ElmanConfig,
    GNMTDecoderConfig,
    GNMTEncoderConfig,
    LSTMConfig,
    LuongConfig,
    Seq2SeqConfig,
)

__all__ = [
    "BahdanauConfig",
    "ChengConfig",
    "ElmanConfig",
    "GNMTDecoderConfig",
    "GNMTEncoderConfig",
    "LSTMConfig",
    "LuongConfig",
    "Seq2SeqConfig",
]
