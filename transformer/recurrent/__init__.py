"""Recurrent mixers: the systems that transformers replaced."""

from transformer.recurrent.elman import ElmanConfig
from transformer.recurrent.lstm import LSTMConfig

__all__ = ["ElmanConfig", "LSTMConfig"]
