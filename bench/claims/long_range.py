"""Every attention variant on a task of the Long Range Arena, beside the arena's own table."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.command import command
from bench.machine import machine
from configs import byte_text, listops
from train.assembly import make_engine, make_task, training_options, with_task
from train.data.examples import ExampleCorpus
from train.data.text_labels import ClassificationSplit
from train.errors import UsageError
from train.evaluation.evaluator import evaluate_split
from train.experiment import Experiment
from train.runtime.local_hardware import local_hardware

VARIANTS = tuple(listops.attention_variants(listops.SMALL))
EXPERIMENTS = {"listops": listops.EXPERIMENTS, "byte_text": byte_text.EXPERIMENTS}

PUBLISHED: dict[str, tuple[float, float]] = {
    "full": (36.37, 64.27),
    "sliding_window": (15.82, 52.98),
    "sparse": (17.07, 63.58),
    "longformer": (35.63, 62.85),
    "linformer": (35.70, 53.94),
    "reformer": (37.27, 56.10),
    "Sinkhorn": (33.67, 61.20),
    "Synthesizer": (36.99, 61.68),
    "bigbird": (36.05, 64.02),
    "linear": (16.13, 65.90),
    "performer": (18.01, 65.40),
}
"""ListOps and Text of table 1 (Tay et al. 2021). Its local attention is of blocks, here windows."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one variant on the test split."""

    accuracy: float  # percent
    loss: float  # nats an example
    steps_per_second: float
    memory: int  # bytes of a training step beside arguments and results


def train_and_test(experiment: Experiment, corpus: ExampleCorpus[ClassificationSplit]) -> Outcome:
    """Train from the seed and evaluate on the test split."""
    task = make_task(experiment).resolve(corpus)
    experiment = with_task(experiment, task)
    engine = make_engine(experiment, local_hardware())
    batches, state = task.training_batches(corpus, training_options(experiment)), engine.init()
    rows = engine.put_batch(batches.host_batch(0, 0, 1))
    # All batches have one shape, so one program is compiled, measured and run.
    step = engine.lower_step(state, rows).compile()
    memory: Any = step.memory_analysis()
    start = time.perf_counter()
    for cursor in range(experiment.steps):
        rows = engine.put_batch(batches.host_batch(cursor, 0, 1))
        state, metrics = step(state, rows, engine.frozen)
        if cursor == 0:  # it is not timed
            jax.block_until_ready(metrics)
            start = time.perf_counter()
    jax.block_until_ready(state.params)
    speed = (experiment.steps - 1) / (time.perf_counter() - start)
    found = evaluate_split(experiment, engine, state.params, corpus, "test", whole=True)
    accuracy, bytes_of_step = 100 * found["accuracy"], int(memory.temp_size_in_bytes)
    return Outcome(accuracy, found["loss"], speed, bytes_of_step)


def guesses(corpus: ExampleCorpus[ClassificationSplit]) -> dict[str, float]:
    """Return the percentage of the test split that the most frequent training classes get right.

    The first token of ListOps is the outermost operator.
    """
    train, test = corpus.split("train"), corpus.split("test")
    counts = np.zeros((corpus.tokenizer.vocab_size, len(corpus.labels)), int)
    np.add.at(counts, (_first_tokens(train), train.targets), 1)
    answers = {
        "most frequent": counts.sum(0).argmax(),
        "by the first token": counts.argmax(1)[_first_tokens(test)],
    }
    return {name: 100 * float(np.mean(test.targets == each)) for name, each in answers.items()}


def _first_tokens(split: ClassificationSplit) -> np.ndarray:  # [n]
    """Return the token after the first one, a special token, of each text."""
    return split.tokens.values[split.tokens.offsets[:-1] + 1]


@command
def long_range(
    task: tyro.conf.Positional[Literal["listops", "byte_text"]] = "listops",
    variants: tuple[str, ...] = VARIANTS,
    steps: int = 200,
    seed: int = 0,
    output: Path | None = None,
) -> None:
    """Train every variant of attention on a task, and print accuracy, speed and memory.

    The small size of `configs/listops.py` or `configs/byte_text.py`: equal encoders, data and
    schedules. The last column is the paper's, of larger models, longer texts and thousands of
    steps: a reference, not a target. The last rows guess without a model.

    Args:
      task: The task.
      variants: Names of experiments of the task.
      steps: Training steps of each; the first is not timed.
      seed: Seed.
      output: A file for the numbers, as JSON.
    """
    if unknown := [name for name in variants if name not in VARIANTS]:
        raise UsageError(f"--variants {unknown[0]}: give some of {', '.join(VARIANTS)}")
    if steps < 2:
        raise UsageError(f"--steps {steps}: the first is not timed; give 2 or more")
    console, column = Console(), 0 if task == "listops" else 1
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    corpus: Any = make_task(EXPERIMENTS[task][variants[0]]).prepare_corpus()
    table = Table(title=f"{task}, {steps} steps")
    for title in ("", "accuracy", "loss", "steps/s", "MiB", "published"):
        table.add_column(title, justify="right" if title else "left")
    outcomes: dict[str, Outcome] = {}
    for name in variants:
        experiment = dataclasses.replace(EXPERIMENTS[task][name], steps=steps, seed=seed)
        found = outcomes[name] = train_and_test(experiment, corpus)
        console.print(f"{name}: {found}")
        jax.clear_caches()
        numbers = f"{found.accuracy:.1f}", f"{found.loss:.3f}", f"{found.steps_per_second:.2f}"
        known = f"{PUBLISHED[name][column]:.2f}" if name in PUBLISHED else ""
        table.add_row(name, *numbers, f"{found.memory / 2**20:,.0f}", known)
    for name in (each for each in PUBLISHED if each not in VARIANTS):
        table.add_row(name, "", "", "", "", f"{PUBLISHED[name][column]:.2f}")
    guessed = guesses(corpus)
    for name, accuracy in guessed.items():
        table.add_row(name, f"{accuracy:.1f}", "", "", "", "")
    console.print(table)
    if output:
        plain = {name: dataclasses.asdict(each) for name, each in outcomes.items()}
        numbers_found = {"machine": machine(), "guesses": guessed, "outcomes": plain}
        output.write_text(json.dumps(numbers_found, indent=1))
