"""Retrieval over long sequences: associative recall of 4,096 tokens, by mixer and distance.

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
from bench.results import over_seeds
from bench.studies.family import mixers, same_size
from bench.studies.recall import AssociativeRecall, recall_examples
from bench.studies.record import Study, at_the_end, markdown_table, sweep_run
from train.data.arrays import ArrayDataConfig
from train.experiment import Experiment
from train.figures import COLORS, DASHES, GREY
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.sweep.grid import SweepRun, run_name
from train.sweep.queue import check_results, run_sweep
from transformer import BigBirdConfig, MixerConfig, NoPosition
from transformer.attention.mixer import mixer_class

LENGTH, WIDTH, PAIRS, STEPS = 4096, 64, 16, 60
SHORT_LENGTH, SHORT_BATCH, SHORT_STEPS = 128, 8, 600
WINDOW_FRACTION = 16  # a window is a sixteenth of a sequence
TEST_EXAMPLES = 8
BINS = 16

NAMES = (
    *("full", "sliding_window", "longformer", "bigbird", "sparse", "top_k", "routing", "reformer"),
    *("performer", "linear", "gated_delta", "mamba2"),
    *("convolution", "lstm", "elman", "identity"),
)
"""Mixers that are compared by default."""


def long_mixers() -> dict[str, MixerConfig]:
    """Return the mixers of the family, with windows of a sixteenth of the sequence."""
    found = mixers(LENGTH * 4 // WINDOW_FRACTION, WIDTH)
    for name, mixer in found.items():
        if hasattr(mixer, "position"):
            plain: Any = mixer
            found[name] = dataclasses.replace(plain, position=NoPosition())
    bigbird = found["bigbird"]
    assert isinstance(bigbird, BigBirdConfig)
    return {**found, "bigbird": dataclasses.replace(bigbird, random_block_span=LENGTH)}


def experiment(name: str, seed: int, *, short: bool) -> Experiment:
    """Return the run of a mixer on short sequences, or after that on long ones, one a step.

    No sequence is seen twice.
    """
    batch_size, steps, rate = (SHORT_BATCH, SHORT_STEPS, 3e-3) if short else (1, STEPS, 1e-3)
    task = AssociativeRecall(
        pairs=PAIRS,
        keys=PAIRS,
        train_examples=batch_size * steps,
        test_examples=64 if short else TEST_EXAMPLES,
    )
    choices = long_mixers()
    made = Experiment(
        f"long-recall-{name}",
        task,
        same_size("recall", choices[name], choices["full"], WIDTH, task.vocab_size),
        ArrayDataConfig(length=SHORT_LENGTH if short else LENGTH),
        batch_size=batch_size,
        optimizer=AdamW(beta2=0.98, weight_decay=0.1),
        schedule=ScheduleConfig(
            "cosine", learning_rate=rate, warmup_steps=steps // 10, min_lr_ratio=0.05
        ),
        steps=steps,
    )
    return at_the_end(made, seed)


def score_flops(name: str) -> float:
    """Return the FLOPs per token of a mixer's scores and of the weighted sum of values."""
    config = long_mixers()[name]
    found = mixer_class(config).score_flops(config, WIDTH, LENGTH)
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


def draw(curves: Mapping[str, np.ndarray]) -> Figure:
    """Draw the accuracy over the position of the question, the mean over seeds.

    Mixers that stay near a guess at every position have no name of their own.
    """
    figure = Figure(figsize=(7, 4.6))
    axes = figure.subplots()
    centers, guess = (np.arange(BINS) + 0.5) * LENGTH / BINS, 100 / PAIRS
    low = [name for name, curve in curves.items() if 100 * curve.max() < 2 * guess]
    for name in low:
        label = f"{len(low)} others, below {2 * guess:.0f}%" if name == low[0] else None
        axes.plot(centers, 100 * curves[name], "-", color="0.75", marker="none", label=label)
    for number, name in enumerate(each for each in curves if each not in low):
        look = {"color": COLORS[number % 7], "linestyle": DASHES[number % 7]}
        marker = "osD^v<>"[number % 7]
        axes.plot(centers, 100 * curves[name], marker=marker, label=name, **look)
    axes.axhline(guess, color=GREY, linewidth=0.8)
    axes.annotate("guess", (LENGTH, guess), (0, -12), textcoords="offset points", ha="right")
    axes.axvline(LENGTH / WINDOW_FRACTION, color=GREY, linewidth=0.8, linestyle="--")
    axes.set(xlabel="position of the question (tokens; dashed: one window)", ylim=(0, 103))
    axes.set_ylabel("accuracy (%)")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def main(names: tuple[str, ...] = NAMES, seeds: int = 3, minutes: float = 0) -> None:
    """Which mixers retrieve over 4,096 tokens, and from how far?"""
    stop = time.monotonic() + 60 * minutes
    study = Study("long_recall", minutes)
    first, runs = [], []
    for seed in range(seeds):
        for name in names:
            settings = {"mixer": name}
            # The name of the first run is compared with those that continue from it: what else
            # decides it, the model and the optimizer, they have themselves.
            first_name = f"{run_name(settings, seed)},steps={SHORT_STEPS}"
            before = sweep_run(settings, experiment(name, seed, short=True), first_name)
            long = sweep_run(settings, experiment(name, seed, short=False))
            start = {"init_from": str(study.workdir / "short" / before.name)}
            first.append(before)
            runs.append(dataclasses.replace(long, warm_start=start))
    # A first run is needed only where the run that continues from it is missing.
    finished = [study.records.find(run) for run in runs]
    known = {b.name: f.result for b, f in zip(first, finished, strict=True) if f is not None}
    folder = str(study.workdir / "short")
    check_results(run_sweep(first, folder, limit_seconds=60 * minutes, known=known), folder)
    left = max(1e-3, (stop - time.monotonic()) / 60) if minutes else 0
    found = study.train(runs, part="long", measure=accuracy_by_position, minutes=left)
    accuracies = {
        name: np.array(
            [found[run.name].measured["accuracy"] for run in runs if run.settings["mixer"] == name]
        )  # [seeds, BINS]
        for name in names
    }
    curves = {name: each.mean(axis=0) for name, each in accuracies.items()}
    rows = []
    for name, curve in curves.items():
        flops = score_flops(name) / score_flops("full")
        parts = (curve[0], curve[1:4].mean(), curve[4:].mean(), flops)
        whole = over_seeds(100 * accuracies[name].mean(axis=1), 1)
        rows.append([name, whole, *(f"{100 * part:.1f}" for part in parts)])
    window = LENGTH // WINDOW_FRACTION
    header = ["mixer", "accuracy (%)", f"first {window}", f"to {4 * window:,}", f"to {LENGTH:,}"]
    table = markdown_table([*header, "score FLOPs (% of `full`)"], rows)
    data = {
        "length": LENGTH,
        "accuracy_by_range": {name: each.round(4).tolist() for name, each in curves.items()},
    }
    study.write([table], draw(curves), data)
