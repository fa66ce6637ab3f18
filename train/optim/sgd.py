"""Stochastic gradient descent, with momentum (Polyak 1964; Sutskever et al. 2013).

m <- momentum * m + gradient
direction = m, or with Nesterov's momentum: gradient + momentum * m
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from train.optim.base import Optimizer, add_weight_decay

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """Stochastic gradient descent."""

    kind: ClassVar[str] = "sgd"

    momentum: float = 0.9
    """Decay rate of the accumulated gradients. 0: plain SGD, without optimizer state."""
    nesterov: bool = False
    """Use Nesterov's momentum."""
    l2: float = 0.0
    """L2 penalty: this multiple of each matrix is added to its gradient."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import optax

        if not self.momentum:
            return add_weight_decay(self.l2, axes)
        momentum = optax.trace(self.momentum, self.nesterov)
        return optax.chain(add_weight_decay(self.l2, axes), momentum)
