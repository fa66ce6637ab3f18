"""Pictures of textbooks: the numbers behind them, against formulas."""

from pathlib import Path

import numpy as np
import pytest
from scipy import special

from bench.pictures import (
    FORMATS,
    activation_curves,
    largest_errors,
    learning_rates,
    spike_run,
)


def test_activations_and_derivatives_match_formulas() -> None:
    x = np.linspace(-3, 3, 13) + 0.1
    curves = activation_curves(x)
    sigmoid = special.expit
    expected = {
        "relu": (np.maximum(x, 0), x > 0),
        "squared_relu": (np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)),
        "silu": (x * sigmoid(x), sigmoid(x) + x * sigmoid(x) * sigmoid(-x)),
        "gelu": (
            x * special.ndtr(x),
            special.ndtr(x) + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi),
        ),
        "swish, β = 4": (
            x * sigmoid(4 * x),
            sigmoid(4 * x) + 4 * x * sigmoid(4 * x) * sigmoid(-4 * x),
        ),
    }
    assert curves.keys() == expected.keys()
    for name, pair in expected.items():
        for actual, reference in zip(curves[name], pair, strict=True):
            np.testing.assert_allclose(actual, reference, atol=1e-5, err_msg=name)


def test_learning_rates_follow_their_formulas() -> None:
    rates = learning_rates(steps=100, width=64)
    n = np.arange(1, 101)
    published = 64**-0.5 * np.minimum(n**-0.5, n * 10.0**-1.5)
    np.testing.assert_allclose(rates["inverse_sqrt as published"], published, rtol=1e-5)
    for name, each in rates.items():
        peak = 64**-0.5 * 10**-0.5 if name.endswith("published") else 1e-3
        assert each.argmax() == 9 or name in ("constant", "warmup_stable_decay")
        assert each.max() == pytest.approx(peak, rel=1e-5)
    assert rates["linear"][54] == pytest.approx(1e-3 * (1 - 0.9 / 2), rel=1e-5)
    assert rates["cosine"][54] == pytest.approx(1e-3 * 0.55, rel=1e-5)
    assert rates["constant"][-1] == pytest.approx(1e-3)


def test_rounding_errors_are_half_a_unit_in_the_last_place() -> None:
    """Between powers of 2, at most half the distance of two adjacent numbers of the format."""
    fraction_bits = dict(zip(FORMATS, (23, 7, 10, 3, 2), strict=True))
    exponents = np.arange(-40, 41)
    errors = largest_errors(exponents)
    for name, bits in fraction_bits.items():
        at_one = errors[name][exponents == 0][0]
        assert 0.7 * 2.0 ** -(bits + 1) < at_one <= 2.0 ** -(bits + 1), name
    assert np.ptp(errors["bfloat16"]) < 1e-9  # as wide a range as float32
    assert np.isinf(errors["float16"][exponents == 16])  # 65,504 is its largest number
    assert np.isfinite(errors["float16"][exponents == 14])
    assert errors["float16"][exponents == -40] == 1  # rounded to zero


@pytest.mark.nightly
def test_spike_is_skipped(tmp_path: Path) -> None:
    steps = spike_run(tmp_path, 120, 1000.0)  # the detector needs 50 steps first
    skipped = [each for each in steps if "reason" in each]
    assert {each["step"] for each in skipped} >= {61}
    others = [each["grad_norm"] for each in steps if "reason" not in each]
    assert min(each["grad_norm"] for each in skipped) > 20 * max(others)
    assert {each["step"] for each in steps if "reason" not in each} == set(range(1, 121))
