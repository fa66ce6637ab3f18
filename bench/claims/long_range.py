"""Every attention variant on a task of the Long Range Arena, beside the arena's own table."""

import dataclasses
import time
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from configs import byte_text, listops
from train.assembly import make_engine, make_task, training_options, with_task
from train.data.examples import ExampleCorpus
from train.data.text_labels import ClassificationSplit
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


def train_and_test(experiment: Experiment, corpus: ExampleCorpus[ClassificationSplit]) -> list[str]:
    """Return accuracy (%) and loss on the test split, steps a second and MiB of a step."""
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
    mebibytes = memory.temp_size_in_bytes / 2**20  # beside arguments and results
    accuracy, loss = f"{100 * found['accuracy']:.1f}", f"{found['loss']:.3f}"
    return [accuracy, loss, f"{speed:.2f}", f"{mebibytes:,.0f}"]


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


def long_range(
    task: tyro.conf.Positional[Literal["listops", "byte_text"]] = "listops", steps: int = 200
) -> None:
    """Train every variant of attention on a task, and print accuracy, speed and memory.

    The small size of `configs/listops.py` or `configs/byte_text.py`: equal encoders, data and
    schedules. The last column is the paper's, of larger models, longer texts and thousands of
    steps: a reference, not a target. The last rows guess without a model.

    Args:
      task: The task.
      steps: Training steps of each; the first is not timed.
    """
    column = 0 if task == "listops" else 1
    published = {name: f"{both[column]:.2f}" for name, both in PUBLISHED.items()}
    corpus: Any = make_task(EXPERIMENTS[task][VARIANTS[0]]).prepare_corpus()
    columns = ("", "accuracy", "loss", "steps/s", "MiB", "published")
    table = Table(*columns, title=f"{task}, {steps} steps")
    for name in VARIANTS:
        experiment = dataclasses.replace(EXPERIMENTS[task][name], steps=steps)
        table.add_row(name, *train_and_test(experiment, corpus), published.pop(name, ""))
        jax.clear_caches()
    for name, accuracy in published.items():  # variants that are not implemented
        table.add_row(name, "", "", "", "", accuracy)
    for name, guessed in guesses(corpus).items():
        table.add_row(name, f"{guessed:.1f}")
    Console().print(table)
