"""Rotary frequencies as the paper has them."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

Frequencies = np.ndarray[Any, np.dtype[np.float64]]
"""Radians a position, of each pair [R / 2]. In float64, as a position of many turns multiplies what
they are off by; they are known before a program is compiled."""


def plain_frequencies(base: float, width: int) -> Frequencies:  # [R / 2]
    """base^(-2i/R) for a width R (Su et al. 2021, section 3.2.2)."""
    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    return np.float64(base) ** -exponents


@dataclasses.dataclass(frozen=True)
class NoScaling:
    """The context is that of training."""

    amplitude: ClassVar[float] = 1.0

    def frequencies(self, base: float, width: int) -> Frequencies:  # [R / 2]
        return plain_frequencies(base, width)
