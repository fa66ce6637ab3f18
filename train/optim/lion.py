"""Lion (Chen et al. 2023)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from train.optim.base import Optimizer, add_weight_decay

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """The sign of a mean of gradients (program 1): half of Adam's state.

    All entries move by the learning rate, so it wants one 3 to 10 times smaller than AdamW's, and
    as many times the weight decay (section 5).
    """

    kind: ClassVar[str] = "lion"

    beta1: float = 0.9
    """Share of the mean in the direction, beside the gradient."""
    beta2: float = 0.99
    """Share of the mean that a step leaves as it is."""
    weight_decay: float = 0.1
    """Each step takes learning rate * weight_decay of a matrix away."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import optax

        lion = optax.scale_by_lion(b1=self.beta1, b2=self.beta2)
        return optax.chain(lion, add_weight_decay(self.weight_decay, axes))
