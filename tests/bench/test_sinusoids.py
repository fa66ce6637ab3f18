"""The figure of sinusoids shows the formula."""

import math
from pathlib import Path

import pytest

from bench import sinusoids


def test_rows_are_positions_and_columns_frequencies() -> None:
    drawn = sinusoids.vectors()
    assert drawn.shape == (128, 64)
    for position, pair in ((0, 5), (3, 0), (127, 31)):
        angle = position / 10_000 ** (2 * pair / 64)
        assert drawn[position, 2 * pair] == pytest.approx(math.sin(angle), abs=1e-5)
        assert drawn[position, 2 * pair + 1] == pytest.approx(math.cos(angle), abs=1e-5)


def test_figure_is_written(tmp_path: Path) -> None:
    sinusoids.main(tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000
