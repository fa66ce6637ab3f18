"""Muon (Jordan et al. 2024): orthogonalized momentum for the matrices of the layers.

Embeddings, biases and gains use Adam (with Nesterov's momentum, without decay). Updates are scaled
to the root mean square of AdamW's (Liu et al. 2025, section 2.2), so that one learning rate suits
both.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import optax
from optax import contrib

from train.optim.optimizer import Optimizer, is_hidden_matrix
from transformer.layers.logical_axes import LogicalAxes
from transformer.validation import Fraction, Mark, NonNegativeFloat, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Muon for matrices, Adam for everything else."""

    kind: ClassVar[str] = "muon"

    ns_steps: PositiveInt = 5
    """Newton-Schulz iterations that orthogonalize a matrix."""
    preconditioning: Literal["frobenius", "aol"] = "frobenius"
    """Scaling that brings all singular values to at most 1 before the first iteration. frobenius:
    divide by the norm of the matrix. aol: one factor for each row, which saves about one iteration
    (Boissin et al. 2025, Turbo-Muon)."""
    momentum: Annotated[Fraction, Mark.SWITCHES_STATE] = 0.95
    """Decay rate of the accumulated gradients of matrices."""
    beta1: Fraction = 0.9
    """Adam: decay rate of the mean of the gradients."""
    beta2: Fraction = 0.95
    """Adam: decay rate of the mean of their squares."""
    epsilon: NonNegativeFloat = 1e-8
    """Adam: added to the root in the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Each step subtracts learning_rate * weight_decay of every matrix of a layer."""

    def make(self, axes: Any) -> optax.GradientTransformation:
        muon = contrib.muon(
            learning_rate=1.0,
            ns_steps=self.ns_steps,
            preconditioning=self.preconditioning,
            beta=self.momentum,
            weight_decay=self.weight_decay,
            adam_b1=self.beta1,
            adam_b2=self.beta2,
            eps=self.epsilon,
            muon_weight_dimension_numbers=jax.tree.map(muon_dimension_numbers, axes),
            consistent_rms=0.2,
        )
        # optax's muon is a complete optimizer: it multiplies by -learning_rate.
        return optax.chain(muon, optax.scale(-1.0))


def muon_dimension_numbers(axes: LogicalAxes) -> contrib.MuonDimensionNumbers | None:
    """Return the axes of a parameter's rows and columns. None: it is updated by Adam.

    Stack axes (layers, experts) are in neither, so that optax treats each layer as a matrix of its
    own. Tables of tokens and positions are matrices by shape only.
    """
    if not is_hidden_matrix(axes):
        return None
    first_row, first_column = len(axes.stack), len(axes.stack) + len(axes.inputs)
    return contrib.MuonDimensionNumbers(
        reduction_axis=tuple(range(first_row, first_column)),
        output_axis=tuple(range(first_column, len(axes.names))),
    )
