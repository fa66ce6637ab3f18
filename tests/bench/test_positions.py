"""Experiments and figures of `bench.positions`."""

from pathlib import Path
from typing import Any

import numpy as np

from bench import positions
from bench.positions import CONTROL, KINDS, LONGEST, band_means, draw, with_positions
from bench.small_runs import LENGTH, small
from transformer import LearnedPositions, RoPE


def test_control_differs_only_in_window_length() -> None:
    base = small(3)
    learned, control = (with_positions(base, kind) for kind in ("learned", CONTROL))
    assert learned.model == control.model
    assert control.model.position_embedding == LearnedPositions(LONGEST)
    assert (learned.sequence_length, control.sequence_length) == (LENGTH, LONGEST)
    assert (
        learned.batch_size * learned.sequence_length == control.batch_size * control.sequence_length
    )


def test_every_kind_replaces_the_quickstarts_rope() -> None:
    for kind in KINDS:
        model = with_positions(small(3), kind).model
        embedded, attended = KINDS[kind]
        assert model.position_embedding == embedded
        mixers: list[Any] = [block.mixer for block in model.layer_pattern]
        assert all(mixer.position == attended for mixer in mixers)
        assert isinstance(attended, RoPE) == (kind == "rotary")


def test_bands_start_with_the_training_length() -> None:
    losses = np.repeat(np.arange(8.0), LENGTH)
    assert band_means(losses) == [0, 1, 2.5, 5.5]
    assert positions.BANDS[0] == (0, LENGTH)
    assert positions.BANDS[-1][1] == LONGEST


def test_figure_is_written(tmp_path: Path) -> None:
    curves = {kind: np.linspace(5, 4, LONGEST) for kind in ("none", "learned", CONTROL, "ALiBi")}
    draw(curves, tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").stat().st_size > 10_000
