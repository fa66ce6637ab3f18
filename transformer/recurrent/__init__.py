"""Recurrent mixers: the systems that transformers replaced."""

from transformer.recurrent.bahdanau import BahdanauConfig
from transformer.recurrent.cheng import ChengConfig
from transformer.recurrent.elman import ElmanConfig
from transformer.recurrent.gnmt_decoder import GNMTDecoderConfig
from transformer.recurrent.gnmt_encoder import GNMTEncoderConfig
from transformer.recurrent.lstm import LSTMConfig
from transformer.recurrent.luong import LuongConfig
from transformer.recurrent.seq2seq import Seq2SeqConfig

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
