"""Retrieval over long sequences: associative recall of 4,096 tokens, by mixer and distance.

    python -m bench.studies.long_recall [--names full bigbird] [--steps 300] [--minutes 10]

`bench.studies.recall` in sequences of 4,096 tokens: pairs of a key and a value stand at the
beginning, and every later token asks for a value. Models and learning rate are those of
`bench.studies.family`: a convolution joins each value to its key, and the mixer looks keys up; all
have as many parameters as `full`. Windows and numbers of keys are a sixteenth of the sequence, so
that what a mixer reaches beyond its window shows: accuracy is given by the position of the
question.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import train
from bench.studies.family import HEADS, mixers, model_with, same_size
from bench.studies.recall import AssociativeRecall, recall_examples
from bench.studies.record import (
    RESULTS,
    markdown_table,
    open_records,
    run_study,
    single_run,
    train_all,
    write_record,
)
from train.data.data_config import ArrayDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.scaling.design import count_without_embeddings
from train.sweep.grid import SweepRun, run_name
from transformer import BigBirdConfig, MixerConfig

WIDTH, LEARNING_RATE = 64, 3e-3
WINDOW_FRACTION = 16  # a window is a sixteenth of a sequence
TEST_EXAMPLES = 8
BINS = 16

NAMES = (
    *("full", "sliding_window", "longformer", "bigbird", "sparse", "top_k", "routing", "reformer"),
    *("performer", "linear", "convolution", "lstm", "elman", "identity"),
)
"""Mixers that are compared by default."""


def long_mixers(length: int) -> dict[str, MixerConfig]:
    """Return the mixers of the family, with windows of a sixteenth of the sequence."""
    found = mixers(length * 4 // WINDOW_FRACTION, WIDTH)
    bigbird = found["bigbird"]
    assert isinstance(bigbird, BigBirdConfig)
    return {**found, "bigbird": dataclasses.replace(bigbird, random_block_span=length)}


def experiment(name: str, *, length: int, pairs: int, steps: int, seed: int) -> Experiment:
    """Return the run of a mixer: one sequence a step, each seen once."""
    task = AssociativeRecall(
        pairs=pairs, keys=pairs, train_examples=steps, test_examples=TEST_EXAMPLES
    )
    choices = long_mixers(length)
    full = model_with("recall", choices["full"], WIDTH, 4 * WIDTH)
    size = count_without_embeddings(dataclasses.replace(full, vocab_size=task.vocab_size))
    model = same_size("recall", choices[name], WIDTH, task.vocab_size, size)
    return Experiment(
        f"long-recall-{name}",
        task,
        dataclasses.replace(model, vocab_size=task.vocab_size),
        ArrayDataConfig(length=length),
        batch_size=1,
        optimizer=AdamW(beta2=0.98, weight_decay=0.1),
        schedule=ScheduleConfig(
            "cosine", learning_rate=LEARNING_RATE, warmup_steps=steps // 10, min_lr_ratio=0.05
        ),
        steps=steps,
        seed=seed,
        evaluation=EvaluationConfig(every=0),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=100, keep_last=1),
    )


def accuracy_by_position(run: SweepRun, folder: Path) -> dict[str, list[float]]:
    """Return the accuracy on test sequences, in equal ranges of the position of the question."""
    loaded, task = train.load(str(folder)), run.experiment.task
    assert isinstance(task, AssociativeRecall)
    examples = recall_examples(task, run.experiment.sequence_length, TEST_EXAMPLES, seed=2)
    model: Any = loaded.model
    predict = jax.jit(
        lambda tokens: model.apply({"params": loaded.params}, tokens).logits.argmax(-1)
    )
    correct = np.concatenate(
        [
            np.asarray(predict(examples["tokens"][row : row + 1])) == targets
            for row, targets in enumerate(examples["targets"])
        ]
    )
    bins = mean_by_range(correct, examples["asked"])
    return {"accuracy": [round(float(each), 4) for each in bins]}


def mean_by_range(
    correct: np.ndarray,  # [examples, T]
    asked: np.ndarray,  # [examples, T] 1 where there is a question
) -> np.ndarray:  # [BINS]
    """Return the mean over the questions in each of `BINS` equal ranges of positions."""
    ranges = zip(
        np.array_split(correct * asked, BINS, axis=1),
        np.array_split(asked, BINS, axis=1),
        strict=True,
    )
    return np.array([right.sum() / max(count.sum(), 1) for right, count in ranges])


def draw(curves: Mapping[str, np.ndarray], length: int, pairs: int, path: Path) -> None:
    """Draw the accuracy over the position of the question, the mean over seeds."""
    figure = Figure(figsize=(7.5, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    centers = (np.arange(BINS) + 0.5) * length / BINS
    for number, (name, curve) in enumerate(curves.items()):
        style = ("-", "--", ":")[number // 10 % 3]
        axes.plot(centers, 100 * curve, style, marker="o", ms=3, label=name)
    axes.axhline(100 / pairs, color="grey", lw=0.8)
    axes.text(length, 100 / pairs, "guess", ha="right", va="bottom", fontsize="small")
    axes.axvline(length / WINDOW_FRACTION, color="grey", lw=0.8, ls="--")
    axes.set(
        xlabel="position of the question (tokens; dashed: one window)",
        ylabel="accuracy (%)",
        ylim=(0, 103),
    )
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    names: tuple[str, ...] = NAMES,
    length: int = 4096,
    pairs: int = 16,
    steps: int = 300,
    seeds: int = 1,
    workdir: Path = Path("runs/long_recall"),
    output: Path = RESULTS,
    processes: int = 1,
    minutes: float = 0,
) -> None:
    """Train what is missing, and write long_recall.md, long_recall.json and long_recall.png."""
    runs = []
    for seed in range(seeds):
        for name in names:
            settings = {"mixer": name}
            made = experiment(name, length=length, pairs=pairs, steps=steps, seed=seed)
            runs.append(single_run(run_name(settings, seed), settings, made))
    records = open_records("long_recall", output)
    results = train_all(
        runs, workdir, records, measure=accuracy_by_position, processes=processes, minutes=minutes
    )
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for run in runs:
        found[run.settings["mixer"]].append(records.measured(run)["accuracy"])
    curves = {name: np.mean(each, axis=0) for name, each in found.items()}
    draw(curves, length, pairs, output / "long_recall.png")
    rows = []
    for name, each in found.items():
        whole = 100 * np.mean(each, axis=1)  # [seeds]
        spread = f" ± {whole.std(ddof=1):.1f}" if seeds > 1 else ""
        by_range = 100 * curves[name]
        parts = (by_range[0], by_range[1:4].mean(), by_range[4:].mean())
        rows.append([name, f"{whole.mean():.1f}{spread}", *(f"{part:.1f}" for part in parts)])
    window = length // WINDOW_FRACTION
    header = ["mixer", "accuracy (%)", f"first {window}", f"to {4 * window:,}", f"to {length:,}"]
    scale = (
        f"Sequences of {length:,} tokens that begin with {pairs} pairs of a key and a value; every "
        f"later token asks for a value, and a guess is right in {100 / pairs:.1f}%. Two layers of "
        f"width {WIDTH}, a convolution of three taps and the mixer, {HEADS} heads, windows of "
        f"{window} tokens, {steps} steps of one sequence, {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}: accuracy on {TEST_EXAMPLES} test sequences, and by "
        "the position of the question. Equal parameters within 2%, one learning rate, tuned for "
        "none. The findings hold at this scale only."
    )
    body = f"{scale}\n\n{markdown_table(header, rows)}"
    data: dict[str, Any] = {
        "length": length,
        "accuracy_by_range": {name: each.round(4).tolist() for name, each in curves.items()},
    }
    title = "Retrieval over 4,096 tokens" if length == 4096 else "Retrieval over long sequences"
    write_record("long_recall", title, body, data, results, folder=output)


if __name__ == "__main__":
    run_study(main)
