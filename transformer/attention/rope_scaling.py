"""Rotary frequencies as the paper has them.

Linear interpolation of positions.

Llama 3's rule.

NTK-aware interpolation.

YaRN: interpolation by parts, and a temperature of the softmax.

Rotary frequencies for contexts longer than those of training, one rule a file.

Each rule gives the `frequencies` of the pairs, and an `amplitude` by which cosines and sines (so
queries and keys each) are multiplied.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    import numpy as np
from typing import TYPE_CHECKING

from transformer.validation import check_at_least

if TYPE_CHECKING:
    pass  # DROPPED
import math
from typing import TYPE_CHECKING

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
        check_at_least("llama3_scaling.original_max_length", self.original_max_length, 1)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"llama3_scaling.low_freq_factor {self.low_freq_factor}: give more than 0 and less "
                f"than high_freq_factor, {self.high_freq_factor}"
            )

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        import numpy as np

        plain = unscaled_frequencies(theta, width)
        turns = self.original_max_length * plain / (2 * math.pi)
        kept = np.clip(
            (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1
        )
        return kept * plain + (1 - kept) * plain / self.factor


@dataclasses.dataclass(frozen=True)
class NTKScaling:
    """A larger base: the fastest pair turns as before, the slowest `factor` times slower.

    base * factor^(R / (R - 2)) (bloc97 2023; Peng et al. 2023, definition 1).
    """

    factor: float = 4.0
    """How many times longer the context becomes."""
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_at_least("ntk_scaling.factor", self.factor, 1)

    def frequencies(self, theta: float, width: int) -> Frequencies:  # [R / 2]
        """Raises ValueError for a single pair: it cannot be the fastest and the slowest."""
        if width < 4:
            raise ValueError(
                f"rope.scaling NTKScaling: needs 4 rotated entries or more, not {width}; "
                "give wider heads, or LinearScaling"
            )
        return unscaled_frequencies(theta * self.factor ** (width / (width - 2)), width)


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
        check_at_least("yarn_scaling.original_max_length", self.original_max_length, 1)
        check_at_least("yarn_scaling.attention_factor", self.attention_factor, 0)
        if not 0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"yarn_scaling.beta_slow {self.beta_slow}: give more than 0 and less than "
                f"beta_fast, {self.beta_fast}"
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


RopeScaling = NoScaling | LinearScaling | NTKScaling | YaRNScaling | Llama3Scaling
