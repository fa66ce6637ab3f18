"""Positions and length: trained at T, tested at T, 2T, 4T and 8T, and loss by position.

    python -m bench.studies.lengths [--steps 300] [--seeds 3] [--minutes 10]

Like `bench.positions`, on the resumable queue and with seeds: the quickstart's model with each kind
of position, trained on windows of 128 tokens and evaluated, without further training, on longer
windows of the same held-out text. Evaluations are stored with the runs.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import train
from bench.positions import BANDS, FACTORS, KINDS, LONGEST, SMOOTHING, with_positions
from bench.small_runs import LENGTH, Trained, losses_by_position, small
from bench.studies.record import (
    RESULTS,
    markdown_table,
    open_records,
    run_study,
    single_run,
    train_all,
    write_record,
)
from train.assembly import make_task
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.sweep.grid import SweepRun, run_name
from transformer import LanguageModel

EVALUATED = 1 << 15
"""Tokens at the beginning of the held-out text on which all lengths are compared."""


def experiment(kind: str, steps: int, seed: int) -> Experiment:
    """Return a run with a kind of position, evaluated only at its end."""
    return dataclasses.replace(
        with_positions(small(steps, seed=seed), kind),
        evaluation=EvaluationConfig(every=0),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=200, keep_last=1),
    )


def evaluate_lengths(run: SweepRun, folder: Path) -> dict[str, Any]:
    """Return the held-out loss of a run at each length, and by position of the longest windows."""
    loaded = train.load(str(folder))
    corpus: Any = make_task(loaded.experiment).prepare_corpus(loaded.tokenizer)
    assert isinstance(loaded.model, LanguageModel)
    trained = Trained(loaded.model, loaded.params, corpus, segments=False)
    found = [losses_by_position(trained, LENGTH * each, tokens=EVALUATED) for each in FACTORS]
    return {
        "losses": [round(float(each.mean()), 5) for each in found],
        "by_position": found[-1].reshape(-1, SMOOTHING).mean(axis=1).round(4).tolist(),
    }


def band_means(losses: np.ndarray) -> list[float]:  # losses: [T / SMOOTHING]
    """Return the mean loss in each range of positions."""
    return [float(losses[begin // SMOOTHING : end // SMOOTHING].mean()) for begin, end in BANDS]


def draw(curves: Mapping[str, np.ndarray], path: Path) -> None:
    """Draw the loss by position of the longest window, the mean over seeds."""
    figure = Figure(figsize=(7.5, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    positions = np.arange(LONGEST // SMOOTHING) * SMOOTHING + SMOOTHING // 2
    for kind, losses in curves.items():
        axes.plot(positions, losses, label=kind)
    axes.axvspan(0, LENGTH, color="grey", alpha=0.15, label="trained length")
    axes.set(xlabel="position in the window (tokens)", ylabel="held-out loss (nats per token)")
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    steps: int = 300,
    seeds: int = 3,
    kinds: tuple[str, ...] = tuple(KINDS),
    workdir: Path = Path("runs/lengths"),
    output: Path = RESULTS,
    processes: int = 1,
    minutes: float = 0,
) -> None:
    """Train what is missing, and write lengths.md, lengths.json and lengths.png."""
    runs = [
        single_run(run_name(settings, seed), settings, experiment(kind, steps, seed))
        for seed in range(seeds)
        for kind in kinds
        for settings in [{"positions": kind}]
    ]
    records = open_records("lengths", output)
    results = train_all(
        runs, workdir, records, measure=evaluate_lengths, processes=processes, minutes=minutes
    )
    by_kind: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in kinds}
    for run in runs:
        by_kind[run.settings["positions"]].append(records.measured(run))
    curves = {
        kind: np.mean([each["by_position"] for each in losses_of_seeds], axis=0)
        for kind, losses_of_seeds in by_kind.items()
    }
    rows, bands, numbers = [], [], {}
    for kind, losses_of_seeds in by_kind.items():
        means = np.array([each["losses"] for each in losses_of_seeds])  # [seeds, lengths]
        numbers[kind] = means.tolist()
        spread = means.std(axis=0, ddof=1 if seeds > 1 else 0)
        rows.append(
            [kind, *(f"{m:.3f} ± {s:.3f}" for m, s in zip(means.mean(0), spread, strict=True))]
        )
        bands.append([kind, *(f"{loss:.3f}" for loss in band_means(curves[kind]))])
    draw(curves, output / "lengths.png")
    lengths = ["positions", *(f"T = {LENGTH * factor:,}" for factor in FACTORS)]
    places = ["positions", *(f"{begin} to {end - 1:,}" for begin, end in BANDS)]
    scale = (
        f"The quickstart's model (4 layers, width 192), {steps} steps of 1,024 tokens on windows "
        f"of {LENGTH}, {seeds} seeds: loss on {EVALUATED:,} held-out tokens, the same at all "
        "lengths, in nats per token, mean and standard deviation over seeds. The findings hold at "
        "this scale only."
    )
    body = "\n\n".join(
        [
            scale,
            markdown_table(lengths, rows),
            f"By position in windows of {LONGEST:,} tokens, mean over seeds:",
            markdown_table(places, bands),
        ]
    )
    data = {
        "lengths": [LENGTH * factor for factor in FACTORS],
        "losses": numbers,
        "by_position": {kind: each.round(4).tolist() for kind, each in curves.items()},
    }
    write_record(
        "lengths",
        "Positions and length",
        body,
        data,
        results,
        trained_on=records.describe_machines(runs),
        folder=output,
    )


if __name__ == "__main__":
    run_study(main)
