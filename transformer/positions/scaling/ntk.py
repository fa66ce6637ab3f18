"""NTK-aware interpolation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from transformer.checks import check_at_least
from transformer.positions.scaling.none import unscaled_frequencies

if TYPE_CHECKING:
    from transformer.positions.scaling.none import Frequencies


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
                f"rotary.scaling NTKScaling: needs 4 rotated entries or more, not {width}; "
                "give wider heads, or LinearScaling"
            )
        return unscaled_frequencies(theta * self.factor ** (width / (width - 2)), width)
