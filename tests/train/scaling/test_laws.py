import numpy as np
import pytest
from scipy import optimize

from train.scaling.laws import (
    ParametricLaw,
    PowerLaw,
    Runs,
    bootstrap_parametric_law,
    fit_parametric_law,
    fit_power_law,
    interval,
    isoflop_minima,
    lower_envelope,
)

REFIT = ParametricLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
"""Constants of Besiroglu et al. 2024, table 1, for the runs of Hoffmann et al. 2022."""


def isoflop_runs(law: ParametricLaw, noise: float, seed: int = 0) -> Runs:
    """Return runs at seven budgets, eight sizes each, with relative noise on the loss."""
    budgets = np.repeat(np.logspace(18, 21, 7), 8)
    factors = np.tile(np.logspace(-0.8, 0.8, 8), 7)
    parameters = np.array([law.optimum(each).parameters for each in budgets]) * factors
    tokens = budgets / 6 / parameters
    generator = np.random.default_rng(seed)
    loss = law(parameters, tokens) * np.exp(noise * generator.standard_normal(len(budgets)))
    return Runs(parameters, tokens, loss)


def test_published_constants_give_the_published_optimum() -> None:
    best = REFIT.optimum(1e19)
    assert best.parameters == pytest.approx(262e6, rel=0.005)
    assert best.tokens / best.parameters == pytest.approx(24.2, abs=0.06)
    assert 6 * best.parameters * best.tokens == pytest.approx(1e19)


def test_the_optimum_is_the_lowest_loss_of_its_budget() -> None:
    budget = 3e20
    result = optimize.minimize_scalar(
        lambda log_n: float(REFIT(np.exp(log_n), budget / 6 / np.exp(log_n))), bounds=(15, 25)
    )
    assert np.log(REFIT.optimum(budget).parameters) == pytest.approx(result.x, abs=1e-3)


@pytest.mark.parametrize("seed", range(2))
def test_known_constants_are_recovered_from_noisy_runs(seed: int) -> None:
    law = fit_parametric_law(isoflop_runs(REFIT, noise=5e-4, seed=seed))
    for name, tolerance in (("E", 0.02), ("alpha", 0.02), ("beta", 0.02), ("A", 0.1), ("B", 0.1)):
        assert getattr(law, name) == pytest.approx(getattr(REFIT, name), rel=tolerance), name


def test_other_constants_are_recovered_exactly_without_noise() -> None:
    true = ParametricLaw(E=0.7, A=30.0, B=900.0, alpha=0.21, beta=0.6)
    law = fit_parametric_law(isoflop_runs(true, noise=0))
    assert vars(law) == pytest.approx(vars(true), rel=1e-4)


def test_fit_is_a_minimum() -> None:
    runs = isoflop_runs(REFIT, noise=5e-4, seed=7)
    runs.loss[[3, 30]] *= 1.3  # outliers, which the objective weighs less
    law = fit_parametric_law(runs)

    def objective(constants: np.ndarray) -> float:
        """Return the objective of Hoffmann et al. 2022, equation 3, with delta 1e-3."""
        e, log_a, log_b, alpha, beta = constants
        n, d = np.log(runs.parameters), np.log(runs.tokens)
        predicted = np.log(np.exp(e) + np.exp(log_a - alpha * n) + np.exp(log_b - beta * d))
        r = np.abs(predicted - np.log(runs.loss))
        return 1e6 * float(np.where(r <= 1e-3, r**2 / 2, 1e-3 * (r - 5e-4)).sum())

    fitted = np.array([np.log(law.E), np.log(law.A), np.log(law.B), law.alpha, law.beta])
    result = optimize.minimize(objective, fitted, method="Nelder-Mead")
    assert result.fun > objective(fitted) - 1e-4


def test_bootstrap_intervals_contain_the_constants_and_shrink_with_noise() -> None:
    widths = []
    for noise in (5e-4, 5e-3):
        runs = isoflop_runs(REFIT, noise=noise, seed=1)
        fits = bootstrap_parametric_law(runs, fit_parametric_law(runs), samples=60)
        low, high = interval([each.alpha for each in fits], confidence=0.99)
        assert low < REFIT.alpha < high
        widths.append(high - low)
    assert widths[1] > 4 * widths[0]


def test_line_in_log_space_is_a_power_law() -> None:
    true = PowerLaw(scale=8.8e13, exponent=0.076)  # Kaplan et al. 2020, equation 1.1
    x = np.logspace(5, 9, 6)
    law = fit_power_law(x, true(x))
    assert (law.scale, law.exponent) == pytest.approx((true.scale, true.exponent))


def test_rising_loss_is_not_a_power_law() -> None:
    with pytest.raises(ValueError, match="the loss does not fall with size"):
        fit_power_law(np.array([1.0, 2.0]), np.array([1.0, 1.1]))
    with pytest.raises(ValueError, match="1 sizes: a power law needs 2 or more"):
        fit_power_law(np.array([2.0, 2.0]), np.array([1.0, 1.1]))


def test_frontier_has_runs_that_no_cheaper_run_beats() -> None:
    x, loss = np.array([3.0, 1, 2, 4, 2]), np.array([2.5, 3, 2.8, 2.6, 2.9])
    assert lower_envelope(x, loss).tolist() == [True, True, True, False, False]


def test_isoflop_minima_follow_the_optimum() -> None:
    minima = isoflop_minima(isoflop_runs(REFIT, noise=0))
    assert len(minima) == 7
    for each in minima:
        # A parabola approximates the law within a few percent.
        best = REFIT.optimum(each.flops)
        assert each.parameters == pytest.approx(best.parameters, rel=0.15)
        assert each.loss == pytest.approx(best.loss, rel=0.005)


def test_budget_without_a_minimum_is_excluded() -> None:
    parameters = np.array([1e6, 2e6, 4e6])
    runs = Runs(parameters, 1e15 / 6 / parameters, np.array([3.0, 2.9, 2.8]))
    assert isoflop_minima(runs) == []


@pytest.mark.parametrize(
    ("parameters", "tokens", "message"),
    [
        (np.ones(4), np.ones(4), "4 runs: the law has 5 constants"),
        (np.full(5, 1e6), np.arange(1.0, 6), "parameters: all runs have 1,000,000"),
        (np.arange(1.0, 6), np.full(5, 100.0), "tokens: all runs have 100"),
    ],
)
def test_runs_that_cannot_identify_the_law_raise(
    parameters: np.ndarray, tokens: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        fit_parametric_law(Runs(parameters, tokens, np.ones_like(tokens)))
