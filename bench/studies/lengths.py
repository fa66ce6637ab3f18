"""Positions and length: trained at T, tested at T, 2T, 4T and 8T, and loss by position.

Like `python -m bench positions`, with seeds: the quickstart's model with each kind of position,
trained on windows of 128 tokens and evaluated, without further training, on longer windows of the
same held-out text.
"""

from pathlib import Path
from typing import Any

import numpy as np

import train
from bench.claims.positions import (
    BAND_NAMES,
    FACTORS,
    KINDS,
    band_means,
    draw_by_position,
    smoothed,
    with_positions,
)
from bench.claims.small_runs import LENGTH, Trained, losses_by_position, small
from bench.results import over_seeds
from bench.studies.record import Study, at_the_end, markdown_table, sweep_run
from train.assembly import make_task
from train.sweep.grid import SweepRun
from transformer import LanguageModel

EVALUATED = 1 << 15
"""Held-out tokens, the same at all lengths."""


def evaluate_lengths(run: SweepRun, folder: Path) -> dict[str, list[float]]:
    """Return the loss at each length, and by position in the longest windows."""
    loaded = train.load(str(folder))
    corpus: Any = make_task(loaded.experiment).prepare_corpus(loaded.tokenizer)
    assert isinstance(loaded.model, LanguageModel)
    trained = Trained(loaded.model, loaded.params, corpus, segments=False)
    found = [losses_by_position(trained, LENGTH * each, tokens=EVALUATED) for each in FACTORS]
    return {
        "losses": [round(float(each.mean()), 5) for each in found],
        "by_position": smoothed(found[-1]).round(4).tolist(),
    }


def main(steps: int = 300, seeds: int = 3, minutes: float = 0) -> None:
    """What does each kind of position lose beyond the trained length, and where in the window?"""
    study = Study("lengths", minutes)
    runs = [
        sweep_run(
            {"positions": kind}, at_the_end(with_positions(small(steps, seed=seed), kind), seed)
        )
        for seed in range(seeds)
        for kind in KINDS
    ]
    found = study.train(runs, measure=evaluate_lengths)
    measured = {
        kind: [found[run.name].measured for run in runs if run.settings["positions"] == kind]
        for kind in KINDS
    }
    losses = {
        kind: np.array([each["losses"] for each in of_seeds])  # [seeds, lengths]
        for kind, of_seeds in measured.items()
    }
    curves = {
        kind: np.mean([each["by_position"] for each in of_seeds], axis=0)
        for kind, of_seeds in measured.items()
    }
    by_length = [
        [kind, *(over_seeds(column, 3) for column in each.T)] for kind, each in losses.items()
    ]
    by_band = [
        [kind, *(f"{loss:.3f}" for loss in band_means(curve))] for kind, curve in curves.items()
    ]
    tables = [
        markdown_table(["positions", *(f"T = {LENGTH * n:,}" for n in FACTORS)], by_length),
        markdown_table(["positions", *BAND_NAMES], by_band),
    ]
    data = {
        "lengths": [LENGTH * factor for factor in FACTORS],
        "losses": {kind: each.tolist() for kind, each in losses.items()},
        "by_position": {kind: each.round(4).tolist() for kind, each in curves.items()},
    }
    study.write(tables, draw_by_position(curves), data)
