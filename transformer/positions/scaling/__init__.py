"""Rotary frequencies for contexts longer than those of training, one rule a file.

Each rule gives the `frequencies` of the pairs, and an `amplitude` by which cosines and sines (so
queries and keys each) are multiplied.
"""

from transformer.positions.scaling.linear import LinearScaling
from transformer.positions.scaling.llama3 import Llama3Scaling
from transformer.positions.scaling.none import NoScaling
from transformer.positions.scaling.ntk import NTKScaling
from transformer.positions.scaling.yarn import YaRNScaling

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "NoScaling",
    "RopeScaling",
    "YaRNScaling",
]

RopeScaling = NoScaling | LinearScaling | NTKScaling | YaRNScaling | Llama3Scaling
