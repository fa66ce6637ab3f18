"""Adam (Kingma and Ba 2015) and AdamW (Loshchilov and Hutter 2019)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from train.optim.base import Optimizer, add_weight_decay

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (algorithm 1): mean of the gradients over the root of the mean of their squares."""

    kind: ClassVar[str] = "adam"

    beta1: float = 0.9
    """Decay rate of the mean of the gradients."""
    beta2: float = 0.95
    """Decay rate of the mean of their squares. The paper has 0.999; a lower value adapts faster and
    suits the noisy gradients of large models."""
    epsilon: float = 1e-8
    """Added to the root in the denominator."""
    l2: float = 0.0
    """L2 penalty: this multiple of each matrix is added to its gradient, so that Adam's denominator
    divides it too. `adamw` has decoupled weight decay instead."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import optax

        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon)
        return optax.chain(add_weight_decay(self.l2, axes), adam)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (algorithm 2)."""

    kind: ClassVar[str] = "adamw"

    beta1: float = 0.9
    """Decay rate of the mean of the gradients."""
    beta2: float = 0.95
    """Decay rate of the mean of their squares."""
    epsilon: float = 1e-8
    """Added to the root in the denominator."""
    weight_decay: float = 0.1
    """Each step subtracts learning_rate * weight_decay of every matrix."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import optax

        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon)
        return optax.chain(adam, add_weight_decay(self.weight_decay, axes))
