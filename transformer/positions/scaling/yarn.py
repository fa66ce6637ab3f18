"""YaRN: interpolation by parts, and a temperature of the softmax."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from transformer.checks import check_at_least
from transformer.positions.scaling.none import unscaled_frequencies

if TYPE_CHECKING:
    from transformer.positions.scaling.none import Frequencies


@dataclasses.dataclass(frozen=True)
class YaRNScaling:
    """Fast pairs are kept, slow ones interpolated, scores sharpened (Peng et al. 2023, 3.4).

    What is between is mixed by a ramp over the number of the pair, from and to whole numbers: so
    do the authors' code and the models trained with it. The paper's own ramp (section 3.2) goes
    over the turns of a pair.
    """

    factor: float = 4.0
    """s, how many times longer the context becomes."""
    original_max_length: int = 4096
    """L, the context of training."""
    beta_fast: float = 32.0
    """beta: pairs that make more turns within L are kept."""
    beta_slow: float = 1.0
    """alpha: pairs that make fewer turns within L are interpolated."""
    attention_factor: float = 0.0
    """sqrt(1/t), by which queries and keys are multiplied each; 0 means 0.1 ln(s) + 1."""

    def __post_init__(self) -> None:
        check_at_least("yarn_scaling.factor", self.factor, 1)
        check_at_least("yarn_scaling.length", self.original_max_length, 1)
        check_at_least("yarn_scaling.attention_factor", self.attention_factor, 0)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"yarn_scaling.slow {self.beta_slow}: give more than 0 and less than fast, {self.beta_fast}"
            )

    @property
    def amplitude(self) -> float:
        return self.attention_factor or 0.1 * math.log(self.factor) + 1

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        import numpy as np

        plain = unscaled_frequencies(theta, width)
        first = max(math.floor(self._pair(self.beta_fast, theta, width)), 0)
        last = min(math.ceil(self._pair(self.beta_slow, theta, width)), width - 1)
        pairs = np.arange(width // 2)
        interpolated = np.clip((pairs - first) / max(last - first, 1e-3), 0, 1)
        return (1 - interpolated) * plain + interpolated * plain / self.factor

    def _pair(self, turns: float, base: float, width: int) -> float:
        """i of the pair that makes so many turns within L: L base^(-2i/R) = 2 pi turns."""
        return (
            width
            * math.log(self.original_max_length / (2 * math.pi * turns))
            / (2 * math.log(base))
        )
