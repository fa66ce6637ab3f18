"""Products that an optimizer makes of its own: those of Muon, once a step whatever the batch."""

import math

from train.experiment import Experiment
from train.optimizers.muon import Muon, muon_dimension_numbers
from transformer.sizes import ParameterLeaf


def count_optimizer_flops(experiment: Experiment, leaves: list[ParameterLeaf]) -> float:
    """Operations of one step, of all parameters."""
    optimizer = experiment.optimizer
    if not isinstance(optimizer, Muon):
        return 0.0
    once = sum(
        _orthogonalised(leaf) for leaf in leaves if muon_dimension_numbers(leaf.axes) is not None
    )
    return float(optimizer.ns_steps * once)


def _orthogonalised(leaf: ParameterLeaf) -> int:
    """Operations of an iteration for a stack of matrices, m rows of n, the longer side last.

    It is A = X X', B = b A + c A A, X <- a X + B X (Jordan et al. 2024).
    """
    stack = math.prod(leaf.shape[: len(leaf.axes.stack)])
    m, n = sorted((leaf.fan_in, leaf.size // stack // leaf.fan_in))
    return stack * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)
