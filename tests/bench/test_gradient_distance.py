"""Vanishing, exploding and constant gradients, at a small size."""

from pathlib import Path

import numpy as np
import pytest

from bench import gradient_distance
from bench.gradient_distance import STACKS, gradient_norms

LENGTH = 33


@pytest.fixture(scope="module")
def norms() -> dict[str, np.ndarray]:
    return {name: gradient_norms(row, length=LENGTH, rows=2) for name, row in STACKS.items()}


@pytest.mark.nightly
def test_recurrent_gradients_vanish_or_explode_and_attention_gradients_do_not(
    norms: dict[str, np.ndarray],
) -> None:
    far = {name: each[LENGTH - 2] / each[1] for name, each in norms.items()}
    assert far["Elman"] < far["LSTM"] < 1e-2
    assert far["Elman"] < 1e-5
    assert far["Elman, recurrent matrix × 2"] > 1
    assert 0.2 < far["transformer"] < 5
    without = norms["transformer without residuals"]
    assert (without[1:-1] < norms["transformer"][1:-1]).all()


def test_figure_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_distance, "gradient_norms", lambda row: np.ones(256))
    gradient_distance.main(tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000
