"""Products that an optimizer makes of its own: those of Muon, once a step whatever the batch."""

import math

from train.experiment import Experiment
from train.optimizers.muon import Muon, sides
from transformer.sizes import Leaf

ITERATIONS = 5
"""Of Newton and Schulz, that optax makes."""


def update_flops(experiment: Experiment, leaves: list[Leaf]) -> float:
    """Operations of one step, of all parameters."""
    if not isinstance(experiment.optimizer, Muon):
        return 0.0
    return float(sum(_orthogonalised(leaf) for leaf in leaves if sides(leaf.axes) is not None))


def _orthogonalised(leaf: Leaf) -> int:
    """Operations for a stack of matrices, m rows of n, the longer side last (Jordan et al. 2024).

    Each iteration is A = X X', B = b A + c A A, X <- a X + B X.
    """
    stack = math.prod(leaf.shape[: len(leaf.axes.stack)])
    m, n = sorted((leaf.inputs, leaf.size // stack // leaf.inputs))
    return stack * ITERATIONS * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
