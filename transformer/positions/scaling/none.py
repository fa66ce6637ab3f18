"""Rotary frequencies as the paper has them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Frequencies: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"
"""Radians per position of each pair [R / 2]. In float64, because their error is multiplied by the
position; they are known before a program is compiled."""


def unscaled_frequencies(theta: float, width: int) -> Frequencies:  # [R / 2]
    """base^(-2i/R) for a width R (Su et al. 2021, section 3.2.2)."""
    import numpy as np

    exponents = np.arange(0, width, 2, dtype=np.float64) / width
    return np.float64(theta) ** -exponents


@dataclasses.dataclass(frozen=True)
class NoScaling:
    """The context is that of training."""

    amplitude: ClassVar[float] = 1.0

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        return unscaled_frequencies(theta, width)
