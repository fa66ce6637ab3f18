"""Lion (Chen et al. 2023, program 1): the sign of a mean of gradients.

    direction = sign(beta1 * m + (1 - beta1) * gradient) + weight_decay * parameter
    m <- beta2 * m + (1 - beta2) * gradient

It has half of Adam's state. All entries of an update have the magnitude of the learning rate, so
that it wants a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the
same factor (section 5).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from train.optim.base import Optimizer, add_weight_decay

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Lion: sign of the momentum, with decoupled weight decay."""

    kind: ClassVar[str] = "lion"

    beta1: float = 0.9
    """Weight of the stored mean, against the new gradient, in the direction."""
    beta2: float = 0.99
    """Decay rate of the stored mean."""
    weight_decay: float = 0.1
    """Each step subtracts learning_rate * weight_decay of every matrix."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import optax

        lion = optax.scale_by_lion(b1=self.beta1, b2=self.beta2)
        return optax.chain(lion, add_weight_decay(self.weight_decay, axes))
