"""Positions and length: trained at T, tested at T, 2T, 4T and 8T, and loss by position.

    python -m bench.studies.lengths [--steps 600] [--seeds 3] [--minutes 10]

As `bench.positions`, on the resumable queue and with seeds: the quickstart's model with each kind
of position, trained on windows of 128 tokens and evaluated, without further training, on longer
windows of the same held-out text. What was evaluated is kept beside the runs.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import train
from bench.positions import BANDS, FACTORS, KINDS, LONGEST, SMOOTHING, band_means, with_positions
from bench.small_runs import LENGTH, Trained, losses_by_position, small
from bench.studies.record import (
    RESULTS,
    markdown_table,
    run_study,
    single_run,
    train_all,
    write_record,
)
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.run_folder.writing import write_atomically
from train.sweep.grid import SweepRun, run_name
from train.tasks.language_modeling import LanguageModelTask
from transformer import LanguageModel


def experiment(kind: str, steps: int, seed: int) -> Experiment:
    """Return a run with a kind of position, evaluated at its end alone."""
    return dataclasses.replace(
        with_positions(small(steps, seed=seed), kind),
        evaluation=EvaluationConfig(every=0),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=200, keep_last=1),
    )


def evaluated(run: SweepRun, workdir: Path) -> list[np.ndarray]:  # [T] for each factor
    """Return the held-out loss by position at each length, computed or read."""
    file = workdir / "logs" / f"{run.name}.lengths.json"
    if not file.exists():
        loaded = train.load(str(workdir / run.name))
        corpus = LanguageModelTask(loaded.experiment).prepare_corpus(loaded.tokenizer)
        assert isinstance(loaded.model, LanguageModel)
        trained = Trained(loaded.model, loaded.params, corpus, segments=False)
        found = [losses_by_position(trained, LENGTH * factor).tolist() for factor in FACTORS]
        write_atomically(file, json.dumps(found))
    return [np.array(each) for each in json.loads(file.read_text())]


def draw(curves: Mapping[str, np.ndarray], path: Path) -> None:
    """Draw the loss by position of the longest window, the mean over seeds."""
    figure = Figure(figsize=(7.5, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    positions = np.arange(LONGEST // SMOOTHING) * SMOOTHING + SMOOTHING // 2
    for kind, losses in curves.items():
        axes.plot(positions, losses.reshape(-1, SMOOTHING).mean(axis=1), label=kind)
    axes.axvspan(0, LENGTH, color="grey", alpha=0.15, label="trained length")
    axes.set(xlabel="position in the window (tokens)", ylabel="held-out loss (nats per token)")
    axes.legend(frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    steps: int = 600,
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
    results = train_all(runs, workdir, processes=processes, minutes=minutes)
    by_kind: dict[str, list[list[np.ndarray]]] = {kind: [] for kind in kinds}
    for run in runs:
        by_kind[run.settings["positions"]].append(evaluated(run, workdir))
    curves = {
        kind: np.mean([each[-1] for each in found], axis=0) for kind, found in by_kind.items()
    }
    rows, bands, numbers = [], [], {}
    for kind, found in by_kind.items():
        means = np.array([[losses.mean() for losses in each] for each in found])  # [seeds, lengths]
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
        f"of {LENGTH}, {seeds} seeds: held-out loss in nats per token, mean and standard "
        "deviation. The findings hold at this scale only."
    )
    body = "\n\n".join(
        [
            scale,
            markdown_table(lengths, rows),
            f"By position in windows of {LONGEST:,} tokens, mean over seeds:",
            markdown_table(places, bands),
        ]
    )
    data = {"lengths": [LENGTH * factor for factor in FACTORS], "losses": numbers}
    write_record("lengths", "Positions and length", body, data, results, folder=output)


if __name__ == "__main__":
    run_study(main)
