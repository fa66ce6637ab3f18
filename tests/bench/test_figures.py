"""Pictures of textbooks: the numbers behind them, against formulas."""

import numpy as np
from scipy import special

from bench.claims.figures import FORMATS, activation_curves, largest_errors


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
