"""Positions and length: trained at T, tested at T, 2T, 4T and 8T, and loss by position.

    python -m bench.studies.lengths [--steps 300] [--seeds 3] [--minutes 10]

Like `python -m bench positions`, with seeds: the quickstart's model with each kind of position,
trained on windows of 128 tokens and evaluated, without further training, on longer windows of the
same held-out text.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import train
from bench.claims.positions import (
    BANDS,
    FACTORS,
    KINDS,
    LONGEST,
    band_means,
    draw_by_position,
    smoothed,
    with_positions,
)
from bench.claims.small_runs import LENGTH, Trained, losses_by_position, small
from bench.command import command
from bench.studies.record import (
    NO_LIMIT,
    Page,
    QueueFlags,
    Study,
    at_the_end,
    markdown_table,
    over_seeds,
    seeds_of,
    sweep_run,
)
from train.assembly import make_task
from train.sweep.grid import SweepRun
from transformer import LanguageModel

EVALUATED = 1 << 15
"""Tokens at the beginning of the held-out text on which all lengths are compared."""


def evaluate_lengths(run: SweepRun, folder: Path) -> dict[str, Any]:
    """Return the held-out loss of a run at each length, and by position of the longest windows."""
    loaded = train.load(str(folder))
    corpus: Any = make_task(loaded.experiment).prepare_corpus(loaded.tokenizer)
    assert isinstance(loaded.model, LanguageModel)
    trained = Trained(loaded.model, loaded.params, corpus, segments=False)
    found = [losses_by_position(trained, LENGTH * each, tokens=EVALUATED) for each in FACTORS]
    return {
        "losses": [round(float(each.mean()), 5) for each in found],
        "by_position": smoothed(found[-1]).round(4).tolist(),
    }


@command
def main(
    steps: int = 300,
    seeds: int = 3,
    kinds: tuple[str, ...] = tuple(KINDS),
    queue: QueueFlags = NO_LIMIT,
) -> None:
    """What does each kind of position lose beyond the trained length, and where in the window?"""
    study = Study("lengths", queue)
    runs = [
        sweep_run(
            {"positions": kind}, at_the_end(with_positions(small(steps, seed=seed), kind), seed)
        )
        for seed in range(seeds)
        for kind in kinds
    ]
    study.train(runs, measure=evaluate_lengths)
    by_kind: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in kinds}
    for run in runs:
        by_kind[run.settings["positions"]].append(study.measured(run))
    losses = {
        kind: np.array([each["losses"] for each in found])  # [seeds, lengths]
        for kind, found in by_kind.items()
    }
    curves = {
        kind: np.mean([each["by_position"] for each in found], axis=0)
        for kind, found in by_kind.items()
    }
    rows = [[kind, *(over_seeds(each, 3) for each in found.T)] for kind, found in losses.items()]
    bands = [
        [kind, *(f"{loss:.3f}" for loss in band_means(curve))] for kind, curve in curves.items()
    ]
    places = ["positions", *(f"{begin} to {end - 1:,}" for begin, end in BANDS)]
    change = {kind: float((found[:, -1] - found[:, 0]).mean()) for kind, found in losses.items()}
    order = sorted(change, key=lambda kind: change[kind])
    lowest = min(losses, key=lambda kind: float(losses[kind][:, -1].mean()))
    page = Page(
        title="Positions and length",
        question=(
            "What does each kind of position lose beyond the trained length, and where in the "
            "window?"
        ),
        answer=(
            f"From {LENGTH} to {LONGEST:,} tokens the loss changes by "
            f"{', '.join(f'{change[kind]:+.3f} ({kind})' for kind in order)}. The lowest at "
            f"{LONGEST:,} tokens is that of {lowest}."
        ),
        table=markdown_table(["positions", *(f"T = {LENGTH * n:,}" for n in FACTORS)], rows),
        settings=(
            "Held-out loss in nats per token. The quickstart's model (4 layers, width 192), "
            f"{steps} steps of 1,024 tokens on windows of {LENGTH}, {seeds_of(seeds)}. The same "
            f"{EVALUATED:,} held-out tokens at all lengths. Learned positions have rows that "
            "training did not reach. The findings hold at this scale only."
        ),
        more=[
            f"By position in windows of {LONGEST:,} tokens, mean over seeds:",
            markdown_table(places, bands),
        ],
    )
    data = {
        "lengths": [LENGTH * factor for factor in FACTORS],
        "losses": {kind: found.tolist() for kind, found in losses.items()},
        "by_position": {kind: each.round(4).tolist() for kind, each in curves.items()},
    }
    study.write(page, draw_by_position(curves), data)


if __name__ == "__main__":
    sys.exit(main())
