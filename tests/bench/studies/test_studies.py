"""Studies on the queue: what they train, and what they conclude from results made by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from bench.studies.versus import (
    NEW,
    OLD,
    Frontier,
    compute,
    compute_factors,
    interpolate_compute,
    sized,
)
from train.scaling.design import count_without_embeddings


def test_both_recipes_have_equal_compute() -> None:
    for width in (64, 128):
        one, other = (sized(recipe, width, 1e-3, 20) for recipe in (OLD, NEW))
        assert compute(one) == pytest.approx(compute(other), rel=0.05)
        parameters = count_without_embeddings(one.model)
        assert compute(one) == pytest.approx(6 * 20 * parameters**2, rel=0.02)


def test_compute_factors_of_known_laws() -> None:
    flops = np.array([1e12, 4e12, 1.6e13])

    def frontier(
        constant: float, spread: Sequence[float] = (1.0,) * 3, flops: np.ndarray = flops
    ) -> Frontier:
        return Frontier(flops, np.outer((constant / flops) ** 0.1, spread))

    old, new = frontier(4e20), frontier(1e20)  # the old recipe needs four times the compute
    for factor in compute_factors(old, new):
        assert factor[:3] == pytest.approx((4.0, 4.0, 4.0))
    # Each recipe has its own compute.
    more = frontier(4e20, flops=1.5 * flops)
    assert [each.value for each in compute_factors(more, new)] == pytest.approx([4.0, 4.0])
    # Beyond the last point, along the last line.
    beyond = compute_factors(new, old)[-1]
    assert beyond.value == pytest.approx(1 / 4)
    assert (beyond.first, beyond.last) == (4e12, 1.6e13)
    alone = compute_factors(frontier(4e20, [1.0]), frontier(1e20, [1.0]))
    assert alone[0].value == pytest.approx(4)
    assert np.isnan(alone[0].low)


def test_compute_is_read_off_the_frontier() -> None:
    """No power law: a plateau, and a point that is worse than a smaller one."""
    flops = np.array([1.0, 100.0, 1e4, 1e6])
    losses = np.array([8.0, 4.0, 5.0, 2.0])
    targets = np.array([8.0, np.sqrt(32.0), 4.0, np.sqrt(8.0), 2.0])
    found = interpolate_compute(flops, losses, targets)
    assert found.compute == pytest.approx([1.0, 10.0, 100.0, 1e4, 1e6])
    assert (found.first[-1], found.last[-1]) == (100.0, 1e6)  # 1e4 is no point of the frontier
    assert np.isnan(interpolate_compute(flops, np.ones(4), targets).compute).all()
