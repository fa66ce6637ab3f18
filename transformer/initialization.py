"""How weights start. Imports nothing that computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from transformer.checks import check_at_least

if TYPE_CHECKING:
    import jax

Initializer = Callable[["jax.Array", tuple[int, ...], Any], "jax.Array"]


@dataclasses.dataclass(frozen=True)
class Initialization:
    """How weights start: normal, with one standard deviation for all or by fan-in."""

    std: float = 0.02
    """Standard deviation of every matrix; 0 means 1/sqrt(fan-in), which suits any width."""
    embedding_std: float = 0.02
    """Standard deviation of token and position tables."""
    depth_scaled: bool = True
    """Divide what is added to the residual stream by sqrt(2 L), as GPT-2 does."""

    def __post_init__(self) -> None:
        check_at_least("initialization.std", self.std, 0)
        check_at_least("initialization.embedding_std", self.embedding_std, 0)

    def matrix_initializer(
        self, inputs: Mapping[str, int], *, num_residual_layers: int = 0
    ) -> Initializer:
        """For a matrix; `num_residual_layers` = L if its result is added to the residual stream."""
        from flax import linen as nn

        std = self.std or 1 / math.sqrt(math.prod(inputs.values()))
        if self.depth_scaled and num_residual_layers:
            std /= math.sqrt(2 * num_residual_layers)
        return nn.initializers.normal(std)

    def embedding_initializer(self) -> Initializer:
        from flax import linen as nn

        return nn.initializers.normal(self.embedding_std)
