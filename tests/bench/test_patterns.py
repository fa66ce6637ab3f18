"""The drawn patterns match the formulas."""

import numpy as np
import pytest

from bench.pattern_panels import FAR, HIDDEN, LENGTH, NEAR, ONE, UNSEEN, panels
from bench.patterns import reasons, seen
from transformer import LongformerConfig, SlidingWindowConfig

INDEX = np.arange(LENGTH)
DISTANCE = INDEX[:, None] - INDEX[None]


@pytest.mark.full
def test_visibility_without_select_is_by_perturbation() -> None:
    config = LongformerConfig(one_sided_window=5, dilations=(2,), num_global_tokens=3, **ONE)
    near = (np.abs(DISTANCE) <= 10) & (DISTANCE % 2 == 0)
    shown = near | (INDEX < 3)[:, None] | (INDEX < 3)[None]
    np.testing.assert_array_equal(seen(config, causal=True), shown & (DISTANCE >= 0))


def test_select_is_combined_with_the_mask() -> None:
    config = SlidingWindowConfig(window=4, dilation=3, **ONE)
    shown = (np.abs(DISTANCE) <= 9) & (DISTANCE % 3 == 0)
    np.testing.assert_array_equal(seen(config, causal=False), shown)
    np.testing.assert_array_equal(seen(config, causal=True), shown & (DISTANCE >= 0))


def test_keys_are_colored_by_the_first_part_that_shows_them() -> None:
    (strided,) = (panel for panel in panels() if panel.name == "strided")
    expected = np.where(DISTANCE % 8 == 0, FAR, UNSEEN)
    expected = np.where(DISTANCE <= 8, NEAR, expected)
    expected = np.where(DISTANCE < 0, HIDDEN, expected)
    np.testing.assert_array_equal(reasons(strided, causal=True), expected)
