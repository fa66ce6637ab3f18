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
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

import train
from bench.command import command
from bench.studies.family import HEADS, mixers, same_size
from bench.studies.recall import AssociativeRecall, recall_examples
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
from train.data.arrays import ArrayDataConfig
from train.experiment import Experiment
from train.figures import COLORS, DASHES, GREY
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
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
    made = Experiment(
        f"long-recall-{name}",
        task,
        same_size("recall", choices[name], choices["full"], WIDTH, task.vocab_size),
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
    )
    return at_the_end(made, seed)


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


def draw(curves: Mapping[str, np.ndarray], length: int, pairs: int) -> Figure:
    """Draw the accuracy over the position of the question, the mean over seeds.

    Mixers that stay near a guess at every position have no name of their own.
    """
    figure = Figure(figsize=(7, 4.6))
    axes = figure.subplots()
    centers, guess = (np.arange(BINS) + 0.5) * length / BINS, 100 / pairs
    low = [name for name, curve in curves.items() if 100 * curve.max() < 2 * guess]
    for name in low:
        label = f"{len(low)} others, below {2 * guess:.0f}%" if name == low[0] else None
        axes.plot(centers, 100 * curves[name], "-", color="0.75", marker="none", label=label)
    for number, name in enumerate(each for each in curves if each not in low):
        look = {"color": COLORS[number % 7], "linestyle": DASHES[number % 7]}
        marker = "osD^v<>"[number % 7]
        axes.plot(centers, 100 * curves[name], marker=marker, label=name, **look)
    axes.axhline(guess, color=GREY, linewidth=0.8)
    axes.annotate("guess", (length, guess), (0, -12), textcoords="offset points", ha="right")
    axes.axvline(length / WINDOW_FRACTION, color=GREY, linewidth=0.8, linestyle="--")
    axes.set(xlabel="position of the question (tokens; dashed: one window)", ylim=(0, 103))
    axes.set_ylabel("accuracy (%)")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


@command
def main(
    names: tuple[str, ...] = NAMES,
    length: int = 4096,
    pairs: int = 16,
    short_steps: int = 600,
    steps: int = 60,
    seeds: int = 3,
    queue: QueueFlags = NO_LIMIT,
) -> None:
    """Which mixers retrieve over 4,096 tokens, and from how far?"""
    stop = time.monotonic() + 60 * queue.minutes
    study = Study("long_recall", queue)
    first, runs = [], []
    common: dict[str, Any] = {"length": length, "pairs": pairs}
    for seed in range(seeds):
        for name in names:
            settings = {"mixer": name}
            short = experiment(name, steps=short_steps, seed=seed, short=True, **common)
            # The name of the first run is compared with those that continue from it: what else
            # decides it, the model and the optimizer, they have themselves.
            before = sweep_run(settings, short, f"{run_name(settings, seed)},steps={short_steps}")
            long = sweep_run(settings, experiment(name, steps=steps, seed=seed, **common))
            start = {"init_from": str(study.workdir / "short" / before.name)}
            first.append(before)
            runs.append(dataclasses.replace(long, warm_start=start))
    # A first run is needed only where the run that continues from it is missing.
    finished = [study.records.find(run) for run in runs]
    known = {b.name: f.result for b, f in zip(first, finished, strict=True) if f is not None}
    folder, limit = str(study.workdir / "short"), 60 * queue.minutes
    ended = run_sweep(first, folder, processes=queue.processes, limit_seconds=limit, known=known)
    check_results(ended, folder)
    left = max(1e-3, (stop - time.monotonic()) / 60) if queue.minutes else 0
    study.train(runs, part="long", measure=accuracy_by_position, minutes=left)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for run in runs:
        found[run.settings["mixer"]].append(study.measured(run)["accuracy"])
    curves = {name: np.mean(each, axis=0) for name, each in found.items()}
    cost = {name: 100 * score_flops(name, length) / score_flops("full", length) for name in names}
    rows = []
    for name, each in found.items():
        by_range = 100 * curves[name]
        parts = (by_range[0], by_range[1:4].mean(), by_range[4:].mean(), cost[name])
        whole = over_seeds(100 * np.mean(each, axis=1), 1)
        rows.append([name, whole, *(f"{part:.1f}" for part in parts)])
    window = length // WINDOW_FRACTION
    header = ["mixer", "accuracy (%)", f"first {window}", f"to {4 * window:,}", f"to {length:,}"]
    header.append("score FLOPs (% of `full`)")
    everywhere = [name for name in names if curves[name].min() > 0.99]
    nearby = [name for name in names if curves[name][0] > 0.99 and name not in everywhere]
    exact = ", ".join(f"`{name}` ({cost[name]:.0f}% of the score FLOPs)" for name in everywhere)
    page = Page(
        title=f"Retrieval over {length:,} tokens",
        question=f"Which mixers retrieve over {length:,} tokens, and from how far?",
        answer=(
            f"More than 99% right at every distance: {exact or 'none'}. Within one window of "
            f"{window} tokens only: {', '.join(f'`{name}`' for name in nearby) or 'none'}; a guess "
            f"is right in {100 / pairs:.1f}%."
        ),
        table=markdown_table(header, rows),
        settings=(
            f"Sequences of {length:,} tokens begin with {pairs} pairs of a key and a value; every "
            f"later token asks for a value. Accuracy on {TEST_EXAMPLES} test sequences, and by the "
            f"position of the question, {seeds_of(seeds)}. Two layers of width {WIDTH}, a "
            f"convolution of three taps and the mixer, {HEADS} heads, windows of {window} tokens, "
            f"no positions. {short_steps} steps of {SHORT_BATCH} sequences of {SHORT_LENGTH} "
            f"tokens, from there {steps} steps of one long sequence. Equal parameters within 2%, "
            "one learning rate, tuned for none. The last column counts the scores and the weighted "
            "sums of values that a causal mask keeps. The findings hold at this scale only."
        ),
    )
    data = {
        "length": length,
        "accuracy_by_range": {name: each.round(4).tolist() for name, each in curves.items()},
    }
    study.write(page, draw(curves, length, pairs), data)


if __name__ == "__main__":
    sys.exit(main())
