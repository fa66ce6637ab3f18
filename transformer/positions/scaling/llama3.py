"""Llama 3's rule."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

from transformer.checks import check_least
from transformer.positions.scaling.none import plain_frequencies

if TYPE_CHECKING:
    from transformer.positions.scaling.none import Frequencies


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Slow pairs are interpolated, fast ones kept, by their turns within the old context.

    The rule of Llama 3.1's published code (`apply_scaling`). It is NTK-by-parts (Peng et al. 2023,
    definition 2) with other bounds.
    """

    factor: float = 8.0
    """What frequencies of less than `low` turns are divided by."""
    low: float = 1.0
    high: float = 4.0
    """Frequencies of more turns than this are kept; those between are mixed."""
    length: int = 8192
    """The context of training."""
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_least("llama3_scaling.factor", self.factor, 1)
        check_least("llama3_scaling.length", self.length, 1)
        if not 0 < self.low < self.high:
            raise ValueError(
                f"llama3_scaling.low {self.low}: give more than 0 and less than high, {self.high}"
            )

    def frequencies(self, base: float, width: int) -> Frequencies:  # [R / 2]
        import numpy as np

        plain = plain_frequencies(base, width)
        turns = self.length * plain / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept * plain + (1 - kept) * plain / self.factor
