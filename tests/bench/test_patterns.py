"""The patterns that are drawn are those of the formulas."""

import numpy as np
import pytest

from bench.pattern_panels import FAR, HIDDEN, LENGTH, NEAR, ONE, UNSEEN, panels
from bench.patterns import reasons, seen
from transformer import LongformerConfig, SlidingWindowConfig

INDEX = np.arange(LENGTH)
DISTANCE = INDEX[:, None] - INDEX[None]


@pytest.mark.full
def test_of_a_mixer_without_select_a_key_is_seen_if_it_changes_the_result() -> None:
    config = LongformerConfig(one_sided_window=5, dilations=(2,), num_global_tokens=3, **ONE)
    near = (np.abs(DISTANCE) <= 10) & (DISTANCE % 2 == 0)
    shown = near | (INDEX < 3)[:, None] | (INDEX < 3)[None]
    np.testing.assert_array_equal(seen(config, causal=True), shown & (DISTANCE >= 0))


def test_select_is_combined_with_the_mask() -> None:
    config = SlidingWindowConfig(window=4, dilation=3, **ONE)
    shown = (np.abs(DISTANCE) <= 9) & (DISTANCE % 3 == 0)
    np.testing.assert_array_equal(seen(config, causal=False), shown)
    np.testing.assert_array_equal(seen(config, causal=True), shown & (DISTANCE >= 0))


def test_a_key_gets_the_color_of_the_first_part_that_shows_it() -> None:
    (strided,) = (panel for panel in panels() if panel.name == "strided")
    expected = np.where(DISTANCE % 8 == 0, FAR, UNSEEN)
    expected = np.where(DISTANCE <= 8, NEAR, expected)
    expected = np.where(DISTANCE < 0, HIDDEN, expected)
    np.testing.assert_array_equal(reasons(strided, causal=True), expected)
