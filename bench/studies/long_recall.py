"""Retrieval over long sequences: associative recall of 4,096 tokens, by mixer and distance.

    python -m bench.studies.long_recall [--names full bigbird] [--steps 60] [--minutes 10]

`bench.studies.recall` in sequences of 4,096 tokens: pairs of a key and a value stand at the
beginning, and every later token asks for a value. Models are those of `bench.studies.family`: a
convolution joins each value to its key, and the mixer looks keys up; all have as many parameters as
`full`. Windows and numbers of keys are a sixteenth of the sequence, so that what a mixer reaches
beyond its window shows: accuracy is given by the position of the question.

Every model learns the task on short sequences first, and continues on long ones from there: a step
of 4,096 tokens shows 16 pairs, 32 sequences of 128 tokens show 512, and full attention that is
trained on four sequences of 1,024 tokens a step is still guessing after 400 steps. Attention has no
positions: the convolution knows the order, and rotary angles of distances that no short sequence
has would have to be learned anew (after 30 long steps: 42% with them, 100% without).
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import train
from bench.studies.family import HEADS, mixers, model_with, same_size
from bench.studies.finished_runs import digest
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
from train.data.arrays import ArrayDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.scaling.design import count_without_embeddings
from train.sweep.grid import SweepRun, run_name
from train.sweep.queue import check_results, run_sweep
from transformer import BigBirdConfig, MixerConfig, NoPosition
from transformer.attention.mixer import mixer_class

WIDTH = 64
SHORT_RATE, LONG_RATE = 3e-3, 1e-3
SHORT_LENGTH, SHORT_BATCH = 128, 8
WINDOW_FRACTION = 16  # a window is a sixteenth of a sequence
TEST_EXAMPLES = 8
BINS = 16

NAMES = (
    *("full", "sliding_window", "longformer", "bigbird", "sparse", "top_k", "routing", "reformer"),
    *("performer", "linear", "gated_delta", "mamba2"),
    *("convolution", "lstm", "elman", "identity"),
)
"""Mixers that are compared by default."""


def long_mixers(length: int) -> dict[str, MixerConfig]:
    """Return the mixers of the family, with windows of a sixteenth of the sequence."""
    found = mixers(length * 4 // WINDOW_FRACTION, WIDTH)
    for name, mixer in found.items():
        if hasattr(mixer, "position"):
            plain: Any = mixer
            found[name] = dataclasses.replace(plain, position=NoPosition())
    bigbird = found["bigbird"]
    assert isinstance(bigbird, BigBirdConfig)
    return {**found, "bigbird": dataclasses.replace(bigbird, random_block_span=length)}


def experiment(
    name: str, *, length: int, pairs: int, steps: int, seed: int, short: bool = False
) -> Experiment:
    """Return the run of a mixer on long sequences, one a step, or first on short ones.

    No sequence is seen twice. `length` is that of the long sequences in both.
    """
    batch_size = SHORT_BATCH if short else 1
    task = AssociativeRecall(
        pairs=pairs,
        keys=pairs,
        train_examples=batch_size * steps,
        test_examples=64 if short else TEST_EXAMPLES,
    )
    choices = long_mixers(length)
    full = model_with("recall", choices["full"], WIDTH, 4 * WIDTH)
    size = count_without_embeddings(dataclasses.replace(full, vocab_size=task.vocab_size))
    model = same_size("recall", choices[name], WIDTH, task.vocab_size, size)
    return Experiment(
        f"long-recall-{name}",
        task,
        dataclasses.replace(model, vocab_size=task.vocab_size),
        ArrayDataConfig(length=SHORT_LENGTH if short else length),
        batch_size=batch_size,
        optimizer=AdamW(beta2=0.98, weight_decay=0.1),
        schedule=ScheduleConfig(
            "cosine",
            learning_rate=SHORT_RATE if short else LONG_RATE,
            warmup_steps=steps // 10,
            min_lr_ratio=0.05,
        ),
        steps=steps,
        seed=seed,
        evaluation=EvaluationConfig(every=0),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=100, keep_last=1),
    )


def score_flops(name: str, length: int) -> float:
    """Return the FLOPs per token of a mixer's scores and of the weighted sum of values."""
    config = long_mixers(length)[name]
    found = mixer_class(config).score_flops(config, WIDTH, length)
    assert found is not None
    return float(found.causal)


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
    short_steps: int = 600,
    steps: int = 60,
    seeds: int = 3,
    workdir: Path = Path("runs/long_recall"),
    output: Path = RESULTS,
    processes: int = 1,
    minutes: float = 0,
) -> None:
    """Train what is missing, and write long_recall.md, long_recall.json and long_recall.png."""
    stop = time.monotonic() + 60 * minutes
    first, runs = [], []
    for seed in range(seeds):
        for name in names:
            settings = {"mixer": name}
            common: dict[str, Any] = {"length": length, "pairs": pairs, "seed": seed}
            short = experiment(name, steps=short_steps, short=True, **common)
            # Another first run has another name, so that runs that continue from it differ too.
            short_name = f"{run_name(settings, seed)},{digest(short)}"
            first.append(single_run(short_name, settings, short))
            long = single_run(
                run_name(settings, seed), settings, experiment(name, steps=steps, **common)
            )
            start = {"init_from": str(workdir / "short" / short_name)}
            runs.append(dataclasses.replace(long, warm_start=start))
    records = open_records("long_recall", output)
    # A first run is needed only where the run that continues from it is missing.
    known = {
        before.name: finished.result
        for before, run in zip(first, runs, strict=True)
        if (finished := records.find(run)) is not None
    }
    folder = str(workdir / "short")
    ended = run_sweep(first, folder, processes=processes, limit_seconds=60 * minutes, known=known)
    check_results(ended, folder)
    results = train_all(
        runs,
        workdir / "long",
        records,
        measure=accuracy_by_position,
        processes=processes,
        minutes=max(1e-3, (stop - time.monotonic()) / 60) if minutes else 0,
    )
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for run in runs:
        found[run.settings["mixer"]].append(records.measured(run)["accuracy"])
    curves = {name: np.mean(each, axis=0) for name, each in found.items()}
    draw(curves, length, pairs, output / "long_recall.png")
    rows = []
    full_flops = score_flops("full", length)
    for name, each in found.items():
        whole = 100 * np.mean(each, axis=1)  # [seeds]
        spread = f" ± {whole.std(ddof=1):.1f}" if seeds > 1 else ""
        by_range = 100 * curves[name]
        parts = (by_range[0], by_range[1:4].mean(), by_range[4:].mean())
        cost = f"{100 * score_flops(name, length) / full_flops:.1f}"
        rows.append([name, f"{whole.mean():.1f}{spread}", *(f"{part:.1f}" for part in parts), cost])
    window = length // WINDOW_FRACTION
    header = ["mixer", "accuracy (%)", f"first {window}", f"to {4 * window:,}", f"to {length:,}"]
    header.append("score FLOPs (% of `full`)")
    scale = (
        f"Sequences of {length:,} tokens that begin with {pairs} pairs of a key and a value; every "
        f"later token asks for a value, and a guess is right in {100 / pairs:.1f}%. Two layers of "
        f"width {WIDTH}, a convolution of three taps and the mixer, {HEADS} heads, windows of "
        f"{window} tokens, no positions. {short_steps} steps of {SHORT_BATCH} sequences of "
        f"{SHORT_LENGTH} tokens, from there {steps} steps of one long sequence, {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}: accuracy on {TEST_EXAMPLES} test sequences, and by "
        "the position of the question. Equal parameters within 2%, one learning rate, tuned for "
        "none. The last column counts the scores and the weighted sums of values that a causal "
        "mask keeps. The findings hold at this scale only."
    )
    body = f"{scale}\n\n{markdown_table(header, rows)}"
    data: dict[str, Any] = {
        "length": length,
        "accuracy_by_range": {name: each.round(4).tolist() for name, each in curves.items()},
    }
    title = "Retrieval over 4,096 tokens" if length == 4096 else "Retrieval over long sequences"
    write_record(
        "long_recall",
        title,
        body,
        data,
        results,
        trained_on=records.describe_machines(runs),
        folder=output,
    )


if __name__ == "__main__":
    run_study(main)
