"""Every attention variant on a task of the Long Range Arena, beside the arena's own table.

    python -m bench.long_range [listops | byte_text] [--steps 200] [--variants full performer]

Each experiment of `configs/listops.py` (or `configs/byte_text.py`) of the small size is trained for
the same number of steps: the same encoder, data, data order and schedule, with another mixer.
Accuracy
is that of the test split, in percent. The last rows are guesses without a model: the most frequent
class of the training split, and the most frequent one for the first token, which in ListOps is the
outermost operator. Steps per second exclude the first one. Memory is what the compiler reserves for
a
training step besides its arguments and results. The last column is table 1 of the paper (Tay et al.
2021): larger models, texts of 2,000 to 4,000 tokens, thousands of steps. It is shown for reference,
not as a target.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.machine import machine
from configs import byte_text, listops
from train.assembly import make_engine, make_task, training_options, with_task
from train.data.examples import ExampleCorpus
from train.data.text_labels import ClassificationSplit
from train.evaluation.evaluator import evaluate_split
from train.experiment import Experiment
from train.runtime.local_hardware import local_hardware

Name = Literal["listops", "byte_text"]

SMALL: dict[Name, dict[str, Experiment]] = {
    "listops": {
        name: listops.EXPERIMENTS[name] for name in listops.attention_variants(listops.SMALL)
    },
    "byte_text": {
        name: byte_text.EXPERIMENTS[name] for name in listops.attention_variants(listops.SMALL)
    },
}

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
"""ListOps and Text of table 1. Its local attention is of blocks, which here are a window."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Train every variant of attention on a long-range task."""

    task: tyro.conf.Positional[Name] = "listops"
    variants: tuple[str, ...] = tuple(SMALL["listops"])
    """Names of experiments of the task."""
    steps: int = 200
    seed: int = 0
    output: Path | None = None
    """A file for the numbers, as JSON."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one variant."""

    accuracy: float
    """Test accuracy in percent."""
    loss: float
    """Nats an example, of the test split."""
    steps_per_second: float
    memory: int
    """Bytes of a training step beside arguments and results."""


def trained(experiment: Experiment, corpus: ExampleCorpus[ClassificationSplit]) -> Outcome:
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
        if cursor == 0:
            jax.block_until_ready(metrics)
            start = time.perf_counter()
    jax.block_until_ready(state.params)
    speed = (experiment.steps - 1) / (time.perf_counter() - start)
    evaluation = evaluate_split(experiment, engine, state.params, corpus, "test", whole=True)
    return Outcome(
        100 * evaluation["accuracy"], evaluation["loss"], speed, int(memory.temp_size_in_bytes)
    )


def guesses(corpus: ExampleCorpus[ClassificationSplit]) -> dict[str, float]:
    """Return the percentage of the test split that the most frequent training classes get right."""
    train, test = corpus.split("train"), corpus.split("test")
    counts = np.zeros((corpus.tokenizer.vocab_size, len(corpus.labels)), int)
    np.add.at(counts, (first_tokens(train), train.targets), 1)
    answers = {
        "most frequent": counts.sum(0).argmax(),
        "by the first token": counts.argmax(1)[first_tokens(test)],
    }
    return {name: 100 * float(np.mean(test.targets == each)) for name, each in answers.items()}


def first_tokens(split: ClassificationSplit) -> np.ndarray:  # [n]
    """Return the token after the first one, of each text."""
    return split.tokens.values[split.tokens.offsets[:-1] + 1]


def table(options: Options, outcomes: dict[str, Outcome], guessed: dict[str, float]) -> Table:
    """Return a row for each variant, and for results that only the paper has."""
    grid = Table(title=f"{options.task}, {options.steps} steps")
    for title in ("", "accuracy", "loss", "steps/s", "MiB", "published"):
        grid.add_column(title, justify="right" if title else "left")
    column = 0 if options.task == "listops" else 1
    known = {name: f"{accuracies[column]:.2f}" for name, accuracies in PUBLISHED.items()}
    for name, found in outcomes.items():
        numbers = f"{found.accuracy:.1f}", f"{found.loss:.3f}", f"{found.steps_per_second:.2f}"
        grid.add_row(name, *numbers, f"{found.memory / 2**20:,.0f}", known.get(name, ""))
    for name in (name for name in known if name not in SMALL[options.task]):
        grid.add_row(name, "", "", "", "", known[name])
    for name, accuracy in guessed.items():
        grid.add_row(name, f"{accuracy:.1f}", "", "", "", "")
    return grid


def chosen(options: Options) -> dict[str, Experiment]:
    """Return the requested experiments."""
    known = SMALL[options.task]
    unknown = [name for name in options.variants if name not in known]
    if unknown:
        raise SystemExit(f"variant {unknown[0]}: is not known; give some of {', '.join(known)}")
    if options.steps < 2:
        raise SystemExit(f"--steps {options.steps}: the first is not timed; give 2 or more")
    changes: dict[str, Any] = dict(steps=options.steps, seed=options.seed)
    return {name: dataclasses.replace(known[name], **changes) for name in options.variants}


def main(options: Options) -> None:
    """Train, and print the table."""
    experiments: Sequence[tuple[str, Experiment]] = list(chosen(options).items())
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    corpus: Any = make_task(experiments[0][1]).prepare_corpus()
    outcomes: dict[str, Outcome] = {}
    for name, experiment in experiments:
        outcomes[name] = trained(experiment, corpus)
        console.print(f"{name}: {outcomes[name]}")
        jax.clear_caches()
    guessed = guesses(corpus)
    console.print(table(options, outcomes, guessed))
    if options.output:
        plain_outcomes = {name: dataclasses.asdict(each) for name, each in outcomes.items()}
        plain = {"machine": machine(), "guesses": guessed, "outcomes": plain_outcomes}
        options.output.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Options))
