"""Scaling laws: fit loss against model size, data and compute, and read the optimum off the fit.

Two families of formulas, for N parameters, D training tokens and C = 6 N D FLOPs:

    Kaplan et al. 2020, section 1.2:    L(x) = (x_c / x)^alpha        for one of N, D and C
    Hoffmann et al. 2022, equation 2:   L(N, D) = E + A / N^alpha + B / D^beta

The second is fitted as in their appendix D.3: the Huber loss of log L, minimized from a grid of
starts. They used L-BFGS, which stopped before the minimum, so that their constants and intervals
are off (Besiroglu et al. 2024). The residuals here go to a trust-region least-squares solver, which
converges in some tens of steps.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

FLOPS_PER_PARAMETER_AND_TOKEN = 6
"""FLOPs of training, C = 6 N D (Kaplan et al. 2020, section 2.1)."""

HUBER_DELTA = 1e-3
"""Residual of log L from which on a run counts linearly: outliers hardly move the fit."""

NUM_POLISHED_STARTS = 24
"""Starts of the grid that the solver continues from: those with the lowest objective."""


class Runs(NamedTuple):
    """Results of training runs, one entry each."""

    parameters: np.ndarray  # [runs] N
    tokens: np.ndarray  # [runs] D
    loss: np.ndarray  # [runs] L, nats per token

    @property
    def flops(self) -> np.ndarray:  # [runs]
        """Compute of each run, C = 6 N D."""
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens

    def select(self, index: np.ndarray) -> "Runs":
        """Return some runs, by index or by a mask of booleans."""
        return Runs(self.parameters[index], self.tokens[index], self.loss[index])


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """L(x) = (scale / x)^exponent (Kaplan et al. 2020, equations 1.1 to 1.3)."""

    scale: float
    exponent: float

    def __call__(self, x: np.ndarray) -> np.ndarray:  # [n] -> [n]
        return (self.scale / np.asarray(x, np.float64)) ** self.exponent


@dataclasses.dataclass(frozen=True)
class ParametricLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, equation 2)."""

    E: float  # loss of the ideal model, the entropy of text
    A: float
    B: float
    alpha: float
    beta: float

    def __call__(self, parameters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the predicted loss for numbers of parameters and of training tokens."""
        n, d = np.asarray(parameters, np.float64), np.asarray(tokens, np.float64)
        return self.E + self.A * n**-self.alpha + self.B * d**-self.beta

    @property
    def has_optimum(self) -> bool:
        """True if the law has a compute-optimal model for every budget."""
        factors = (self.A, self.B, self.alpha, self.beta)
        return math.isfinite(self.E) and all(math.isfinite(x) and x > 0 for x in factors)

    def optimum(self, flops: float) -> "Optimum":
        """Return the sizes with the lowest loss for a budget (Hoffmann et al. 2022, equation 4)."""
        # In logarithms, as the factors may be beyond a float where exponents are small.
        total = self.alpha + self.beta
        log_ratio = math.log(self.alpha * self.A) - math.log(self.beta * self.B)
        log_product = math.log(flops / FLOPS_PER_PARAMETER_AND_TOKEN)  # of N D
        log_parameters = (log_ratio + self.beta * log_product) / total
        with np.errstate(over="ignore"):
            parameters, tokens = np.exp([log_parameters, log_product - log_parameters])
            loss = self(parameters, tokens)
        return Optimum(flops, float(parameters), float(tokens), float(loss))


class Optimum(NamedTuple):
    """Compute-optimal model of a budget."""

    flops: float  # C
    parameters: float  # N
    tokens: float  # D
    loss: float


class Interval(NamedTuple):
    """Confidence interval of a fitted value."""

    low: float
    high: float


def fit_power_law(
    x: np.ndarray,  # [runs]
    loss: np.ndarray,  # [runs]
) -> PowerLaw:
    """Fit a straight line to log L over log x, by least squares.

    Raises:
      ValueError: With fewer than two different x, or losses that do not fall with x.
    """
    if len(np.unique(x)) < 2:
        raise ValueError(f"{len(np.unique(x))} sizes: a power law needs 2 or more; add runs")
    slope, intercept = np.polyfit(np.log(x), np.log(loss), 1)
    # Beyond a float: the loss falls by less than the noise.
    if slope >= 0 or intercept / -slope > np.log(np.finfo(float).max):
        raise ValueError("the loss does not fall with size: no power law fits; train for longer")
    return PowerLaw(float(np.exp(intercept / -slope)), float(-slope))


def lower_envelope(
    x: np.ndarray,  # [runs]
    loss: np.ndarray,  # [runs]
) -> np.ndarray:  # [runs] bool
    """Mark the runs that no run with a smaller or equal x beats: the frontier of a sweep."""
    order = np.lexsort((loss, x))
    best = np.minimum.accumulate(loss[order])
    is_frontier = np.ones(len(x), bool)
    is_frontier[1:] = best[1:] < best[:-1]
    marked = np.zeros(len(x), bool)
    marked[order] = is_frontier
    return marked


def fit_parametric_law(runs: Runs) -> ParametricLaw:
    """Fit L(N, D) (Hoffmann et al. 2022, appendix D.3).

    Raises:
      ValueError: With fewer than 5 runs, or only one size or one number of tokens.
    """
    if len(runs.loss) < 5:
        raise ValueError(f"{len(runs.loss)} runs: the law has 5 constants; give 5 runs or more")
    for name, values in (("parameters", runs.parameters), ("tokens", runs.tokens)):
        if len(np.unique(values)) < 2:
            raise ValueError(f"{name}: all runs have {values[0]:,.0f}; vary it to fit its exponent")
    points = _Points.of(runs)
    starts = _starts(runs)
    objectives = [special.huber(HUBER_DELTA, points.residuals(each)).sum() for each in starts]
    best = np.argsort(objectives)[:NUM_POLISHED_STARTS]
    fits = [points.minimize(starts[index]) for index in best]
    return points.law(min(fits, key=lambda fit: float(fit.cost)).x)


def bootstrap_parametric_law(
    runs: Runs, law: ParametricLaw, *, samples: int = 200, seed: int = 0
) -> list[ParametricLaw]:
    """Return fits to resampled runs (with replacement), each started from the fit to all runs.

    Resamples in which only one size or one number of tokens is left are drawn again.
    """
    generator = np.random.default_rng(seed)
    points, fits = _Points.of(runs), list[ParametricLaw]()
    start = points.theta(law)
    while len(fits) < samples:
        index = generator.integers(0, len(runs.loss), len(runs.loss))
        resample = points._replace(
            x=points.x[index], y=points.y[index], log_loss=points.log_loss[index]
        )
        if min(len(np.unique(resample.x)), len(np.unique(resample.y))) > 1:
            with np.errstate(over="ignore"):
                fits.append(points.law(resample.minimize(start).x))
    return fits


def interval(values: list[float], confidence: float = 0.95) -> Interval:
    """Return the central interval of bootstrap values."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.array(values), [tail, 1 - tail])
    return Interval(float(low), float(high))


def isoflop_minima(runs: Runs, tolerance: float = 0.1) -> list[Optimum]:
    """Return the minimum of L over log N for each budget (Hoffmann et al. 2022, section 3.2).

    Runs whose budgets differ by less than `tolerance` (relative) form a group. Groups with fewer
    than 3 sizes, or whose parabola has no minimum among their sizes, are left out.
    """
    order = np.argsort(runs.flops)
    groups: list[list[int]] = []
    for index in order:
        first = groups[-1][0] if groups else None
        if first is not None and runs.flops[index] <= runs.flops[first] * (1 + tolerance):
            groups[-1].append(int(index))
        else:
            groups.append([int(index)])
    minima = []
    for group in map(np.array, groups):
        log_n = np.log(runs.parameters[group])
        if len(np.unique(log_n)) < 3:
            continue
        curvature, slope, constant = np.polyfit(log_n, runs.loss[group], 2)
        best = -slope / (2 * curvature) if curvature > 0 else math.nan
        if not log_n.min() <= best <= log_n.max():
            continue
        flops, n = float(np.exp(np.log(runs.flops[group]).mean())), math.exp(best)
        loss = float(constant - slope**2 / (4 * curvature))
        tokens = flops / (FLOPS_PER_PARAMETER_AND_TOKEN * n)
        minima.append(Optimum(flops, n, tokens, loss))
    return minima


def _starts(runs: Runs) -> np.ndarray:  # [starts, 5]
    """Return the grid of starts: exponents, and how the excess loss is shared by N, D and E."""
    low = float(np.log(runs.loss.min()))
    exponents = (0.05, 0.2, 0.35, 0.5, 0.8, 1.2)
    depths = (-0.05, -0.3, -1.0)  # log E below the lowest loss
    shares = (-0.7, -2.0, -3.5)  # logs of A N^-alpha and B D^-beta at the centers
    grid = itertools.product(shares, shares, depths, exponents, exponents)
    return np.array([(low + a, low + b, low + e, alpha, beta) for a, b, e, alpha, beta in grid])


class _Points(NamedTuple):
    """Runs as the optimizer sees them.

    It works on theta = (a, b, e, alpha, beta) with

        log L = logsumexp(a - alpha x, b - beta y, e),    x = log N - mean, y = log D - mean

    so that E, A and B stay positive. Centering x and y makes a and alpha (b and beta) nearly
    independent: without it the minimum lies at the end of a long, narrow valley.
    """

    x: np.ndarray  # [runs]
    y: np.ndarray  # [runs]
    log_loss: np.ndarray  # [runs]
    centers: tuple[float, float]  # means of log N and log D

    @classmethod
    def of(cls, runs: Runs) -> "_Points":
        x, y = np.log(runs.parameters), np.log(runs.tokens)
        return cls(x - x.mean(), y - y.mean(), np.log(runs.loss), (x.mean(), y.mean()))

    def terms(self, theta: np.ndarray) -> np.ndarray:  # [3, runs] logs of the three terms of L
        a, b, e, alpha, beta = theta
        return np.stack([a - alpha * self.x, b - beta * self.y, np.full_like(self.x, e)])

    def residuals(self, theta: np.ndarray) -> np.ndarray:  # [runs] predicted minus measured log L
        predicted: np.ndarray = np.logaddexp.reduce(self.terms(theta))
        return predicted - self.log_loss

    def jacobian(self, theta: np.ndarray) -> np.ndarray:  # [runs, 5]
        terms = self.terms(theta)
        n, d, e = np.exp(terms - np.logaddexp.reduce(terms))  # share of each term in L
        return np.stack([n, d, e, -n * self.x, -d * self.y], axis=1)

    def minimize(self, start: np.ndarray) -> optimize.OptimizeResult:
        return optimize.least_squares(
            self.residuals,
            start,
            self.jacobian,
            loss="huber",
            f_scale=HUBER_DELTA,
            x_scale="jac",
            max_nfev=300,
        )

    def law(self, theta: np.ndarray) -> ParametricLaw:
        a, b, e, alpha, beta = map(float, theta)
        with np.errstate(over="ignore"):  # a resample of few runs may have any exponent
            logs = np.array([e, a + alpha * self.centers[0], b + beta * self.centers[1]])
            E, A, B = map(float, np.exp(logs))
        return ParametricLaw(E=E, A=A, B=B, alpha=alpha, beta=beta)

    def theta(self, law: ParametricLaw) -> np.ndarray:  # [5]
        # Constants of a fit to noise may have left the range of floats.
        a, b, e = np.log(np.clip([law.A, law.B, law.E], 1e-300, 1e300))
        x, y = self.centers
        return np.array([a - law.alpha * x, b - law.beta * y, e, law.alpha, law.beta])
