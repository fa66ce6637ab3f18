"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from train.optim.base import Optimizer, add_weight_decay

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """m = momentum * m + g; the direction is m (Polyak 1964; Sutskever et al. 2013)."""

    kind: ClassVar[str] = "sgd"

    momentum: float = 0.9
    """0: none, and nothing is kept."""
    nesterov: bool = False
    """Whether the direction is g + momentum * m."""
    l2: float = 0.0
    """This much of a matrix is added to its gradient."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        import optax

        if not self.momentum:
            return add_weight_decay(self.l2, axes)
        return optax.chain(
            add_weight_decay(self.l2, axes), optax.trace(self.momentum, self.nesterov)
        )
