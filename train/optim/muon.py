"""Muon (Jordan et al. 2024)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from train.optim.base import Optimizer, is_axes
from transformer.validation import check_at_least, check_choice

if TYPE_CHECKING:
    import optax
    from optax import contrib

    from transformer.layers.logical_axes import LogicalAxes

Preconditioning = Literal["frobenius", "aol"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """The momentum of each of the layers' matrices, orthogonalised, however they are stacked.

    Embeddings, biases and gains go by Adam, with Nesterov's momentum too and without decay. Updates
    are scaled to the size of AdamW's (Liu et al. 2025, section 2.2): one rate serves both.
    """

    kind: ClassVar[str] = "muon"

    ns_steps: int = 5
    """Of Newton and Schulz, by which a matrix is made orthogonal."""
    preconditioning: Preconditioning = "frobenius"
    """What brings singular values to 1 at most before the first iteration: `frobenius`, the norm of
    the matrix; `aol`, a factor for each of its rows, with which an iteration less comes about as
    far (Boissin et al. 2025, Turbo-Muon)."""
    momentum: float = 0.95
    beta1: float = 0.9
    """Of Adam, as those below."""
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Each step takes learning rate * weight_decay of a layer's matrix away."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("optimizer.ns_steps", self.ns_steps, 1)
        known = get_args(Preconditioning)
        check_choice("optimizer.preconditioning", self.preconditioning, known)

    def make(self, axes: Any) -> optax.GradientTransformation:
        import jax
        import optax
        from optax import contrib

        muon = contrib.muon(
            learning_rate=1.0,
            ns_steps=self.ns_steps,
            preconditioning=self.preconditioning,
            beta=self.momentum,
            weight_decay=self.weight_decay,
            adam_b1=self.beta1,
            adam_b2=self.beta2,
            eps=self.epsilon,
            muon_weight_dimension_numbers=jax.tree.map(
                muon_dimension_numbers, axes, is_leaf=is_axes
            ),
            consistent_rms=0.2,
        )
        return optax.chain(muon, optax.scale(-1.0))


def muon_dimension_numbers(axes: LogicalAxes) -> contrib.MuonDimensionNumbers | None:
    """Which axes are a matrix's rows and columns; None for what Muon leaves alone."""
    from optax import contrib

    if not axes.is_matrix or "vocab" in axes.names or "positions" in axes.names:
        return None
    start, middle = len(axes.stack), len(axes.stack) + len(axes.inputs)
    return contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(start, middle)),
        output_axis=tuple(range(middle, len(axes.names))),
    )
