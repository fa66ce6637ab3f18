"""Llama 3's rule."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar

from transformer.checks import check_at_least
from transformer.positions.scaling.none import unscaled_frequencies

if TYPE_CHECKING:
    from transformer.positions.scaling.none import Frequencies


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Slow pairs are interpolated, fast ones kept, by their turns within the old context.

    The rule of Llama 3.1's published code (`apply_scaling`). It is NTK-by-parts (Peng et al. 2023,
    definition 2) with other bounds.
    """

    factor: float = 8.0
    """What frequencies of less than `low_freq_factor` turns are divided by."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Frequencies of more turns than this are kept; those between are mixed."""
    original_max_length: int = 8192
    """The context of training."""
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_at_least("llama3_scaling.factor", self.factor, 1)
        check_at_least("llama3_scaling.length", self.original_max_length, 1)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"llama3_scaling.low {self.low_freq_factor}: give more than 0 and less than high, {self.high_freq_factor}"
            )

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        import numpy as np

        plain = unscaled_frequencies(theta, width)
        turns = self.original_max_length * plain / (2 * math.pi)
        kept = np.clip(
            (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1
        )
        return kept * plain + (1 - kept) * plain / self.factor
