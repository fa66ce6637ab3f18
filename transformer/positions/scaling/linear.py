"""Linear interpolation of positions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from transformer.checks import check_at_least
from transformer.positions.scaling.none import unscaled_frequencies

if TYPE_CHECKING:
    from transformer.positions.scaling.none import Frequencies


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position m is taken for m / factor (Chen et al. 2023)."""

    factor: float = 4.0
    """How many times longer the context becomes."""
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_at_least("linear_scaling.factor", self.factor, 1)

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        return unscaled_frequencies(theta, width) / self.factor
