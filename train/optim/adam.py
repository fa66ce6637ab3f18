"""Adam (Kingma and Ba 2015).

AdamW (Loshchilov and Hutter 2019).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from train.optim.base import Optimizer, add_weight_decay

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """The mean of the gradients over the root of the mean of their squares (algorithm 1)."""

    kind: ClassVar[str] = "adam"

    beta1: float = 0.9
    beta2: float = 0.95
    """0.999 in the paper; less forgets sooner, and suits noisy gradients of large models."""
    epsilon: float = 1e-8
    l2: float = 0.0
    """This much of a matrix is added to its gradient, and so divided by the root too: `adamw` has
    the decay that is not."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import optax

        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon)
        return optax.chain(add_weight_decay(self.l2, axes), adam)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (algorithm 2)."""

    kind: ClassVar[str] = "adamw"

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Each step takes learning rate * weight_decay of a matrix away."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import optax

        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon)
        return optax.chain(adam, add_weight_decay(self.weight_decay, axes))
