"""Pretraining: masked language modeling on WikiText-2 before TREC and SST-2, or no pretraining.

    python -m bench.studies.pretraining --data DATA [--minutes 10]
        [--pretraining-steps 4000] [--steps 1000] [--seeds 3]

`bert_tiny` (2 layers of width 128) is trained on WikiText-2 once. Then the same model, with a new
head for labels, is trained on each task from those weights (`fit --init-from`) and from nothing,
with the same tokenizer, dropout, steps, batches and learning rates. Each start has the learning
rate that gives it the better mean validation accuracy; the table has the test accuracy at that
rate, the mean over seeds and their standard deviation.

DATA holds `wikitext-2/`, `trec/` and `sst2/`. The runs are folders of --workdir, named by a digest
of their settings; the same command goes on where it was stopped, and one with other steps or other
data trains runs of its own.
"""

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import train
from bench.studies.finished_runs import digest
from bench.studies.record import RESULTS, markdown_table, run_study, write_record
from train.config.experiment_files import find_experiment
from train.data.data_config import TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.runtime.signals import PreemptedError
from train.runtime.writing import write_atomically
from train.sweep.sweep_folder import RunResult
from train.tasks.classification import Classification

TASKS = ("trec", "sst2")
STARTS = ("pretrained", "nothing")
LEARNING_RATES = (3e-4, 1e-3)
BATCH_SIZE, MAX_LENGTH, DROPOUT, WARMUP = 32, 64, 0.1, 50


class Setting(NamedTuple):
    """One run of a task."""

    task: str
    start: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run; its folder also has the digest of its settings."""
        return f"{self.task}-{self.start}-{self.learning_rate:g}-seed{self.seed}"


def pretraining_experiment(data: Path, steps: int) -> Experiment:
    """Return `bert_tiny` on WikiText-2."""
    base = find_experiment("bert_tiny")
    text = dataclasses.replace(
        base.text_data,
        path=str(data / "wikitext-2" / "train.txt"),
        validation_path=str(data / "wikitext-2" / "valid.txt"),
    )
    return dataclasses.replace(
        base,
        data=text,
        steps=steps,
        evaluation=EvaluationConfig(every=0, num_batches=20),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=200, keep_last=1),
    )


def task_experiment(pretrained: train.Run, data: Path, setting: Setting, steps: int) -> Experiment:
    """Return a classifier with the model and the tokenizer of the pretrained run."""
    base = find_experiment(setting.task)
    folder = data / setting.task
    paths = {
        "trec": {"path": "TREC.train.all", "test_path": "TREC.test.all"},
        "sst2": {"path": "train.tsv", "validation_path": "dev.tsv", "test_path": "test.tsv"},
    }[setting.task]
    changes: dict[str, Any] = {name: str(folder / file) for name, file in paths.items()}
    tokenizer = TokenizerConfig("file", path=str(pretrained.folder.tokenizer))
    texts: Any = base.data
    texts = dataclasses.replace(texts, tokenizer=tokenizer, max_length=MAX_LENGTH, **changes)
    model = pretrained.model.config
    layers = tuple(
        dataclasses.replace(block, residual_dropout=DROPOUT) for block in model.layer_pattern
    )
    return dataclasses.replace(
        base,
        name=setting.name,
        task=Classification(pooling="mean", classifier_dropout=DROPOUT),
        model=dataclasses.replace(model, layer_pattern=layers, embedding_dropout=DROPOUT),
        data=texts,
        optimizer=AdamW(beta2=0.98, weight_decay=0.1),
        schedule=ScheduleConfig(
            "cosine", learning_rate=setting.learning_rate, warmup_steps=WARMUP, min_lr_ratio=0.0
        ),
        steps=steps,
        batch_size=BATCH_SIZE,
        seed=setting.seed,
        evaluation=EvaluationConfig(every=0, num_batches=0),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=steps, keep_last=1),
    )


def folder_name(name: str, *experiments: Experiment) -> str:
    """Return the name of a run's folder: other settings of the run have another.

    Args:
      name: First part of the folder's name.
      experiments: The run, after that which it starts from, which decides its tokenizer.
    """
    return f"{name}-{digest(*experiments)}"


class Results:
    """Results of runs by the name of their folder, kept in a file of the work folder."""

    def __init__(self, workdir: Path) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        self._file = workdir / "results.json"
        self.by_name: dict[str, dict[str, float]] = {}
        if self._file.exists():
            self.by_name = json.loads(self._file.read_text())

    def is_finished(self, name: str) -> bool:
        """Return True if the run has a result; a run that was stopped has only its seconds."""
        return self.by_name.get(name, {}).keys() > {"seconds"}

    def add(self, name: str, values: dict[str, float]) -> None:
        """Keep the result of a run."""
        self.by_name[name] = self.by_name.get(name, {}) | values
        self._write()

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of a part of a run, also of one that is stopped."""
        begun = time.monotonic()
        try:
            yield
        finally:
            before = self.by_name.get(name, {})
            seconds = before.get("seconds", 0.0) + time.monotonic() - begun
            self.by_name[name] = before | {"seconds": seconds}
            self._write()

    def _write(self) -> None:
        write_atomically(self._file, json.dumps(self.by_name, indent=1) + "\n")


def train_setting(
    pretrained: train.Run, experiment: Experiment, folder: Path, start: str
) -> dict[str, float]:
    """Train one run; return its accuracies."""
    run = train.fit(
        experiment,
        folder,
        init_from=str(pretrained.folder.path) if start == "pretrained" else "",
        quiet=True,
    )
    return {split: run.evaluate(split)["accuracy"] for split in ("validation", "test")}


class Row(NamedTuple):
    """A start of a task at its better learning rate."""

    task: str
    start: str
    learning_rate: float
    validation: float
    test: list[float]
    """Test accuracy of each seed."""


def all_rows(found: dict[str, dict[str, float]], seeds: int) -> list[Row]:
    """Return each task and start at each learning rate."""
    rows = []
    for task, start, rate in itertools.product(TASKS, STARTS, LEARNING_RATES):
        runs = [found[Setting(task, start, rate, seed).name] for seed in range(seeds)]
        validation = float(np.mean([each["validation"] for each in runs]))
        rows.append(Row(task, start, rate, validation, [each["test"] for each in runs]))
    return rows


def choose_rows(rows: Sequence[Row]) -> list[Row]:
    """Return each task and start at the learning rate of the best mean validation accuracy."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = row.task, row.start
        best[key] = max(best.get(key, row), row, key=lambda each: each.validation)
    return list(best.values())


def draw(rows: list[Row], path: Path) -> None:
    """Draw the test accuracy of every seed, and the means."""
    figure = Figure(figsize=(5.5, 3.6), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(rows):
        axes.bar(number, np.mean(row.test), color="C0" if row.start == "pretrained" else "C7")
        axes.scatter([number] * len(row.test), row.test, color="black", s=12, zorder=3)
    axes.set_xticks(range(len(rows)), [f"{row.task}\n{row.start}" for row in rows])
    axes.set(ylabel="test accuracy", ylim=(0, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    data: Path,
    pretraining_steps: int = 4000,
    steps: int = 1000,
    seeds: int = 5,
    minutes: float = 0,
    workdir: Path = Path("runs/pretraining"),
    output: Path = RESULTS,
) -> None:
    """Train what is left, then write the page."""
    stop = time.monotonic() + 60 * minutes if minutes else float("inf")
    results = Results(workdir)
    data = data.resolve()
    first = pretraining_experiment(data, pretraining_steps)
    pretrained_name = folder_name("pretrained", first)
    if results.is_finished(pretrained_name):
        pretrained = train.fit(first, workdir / pretrained_name, quiet=True)
    else:
        with results.timed(pretrained_name):
            pretrained = train.fit(first, workdir / pretrained_name, quiet=True)
        results.add(pretrained_name, {"loss": pretrained.final_metrics["loss"]})
    loss = results.by_name[pretrained_name]["loss"]
    settings = [
        Setting(task, start, rate, seed)
        for seed in range(seeds)
        for task in TASKS
        for start in STARTS
        for rate in LEARNING_RATES
    ]
    found = {"pretrained": results.by_name[pretrained_name]}
    for setting in settings:
        experiment = task_experiment(pretrained, data, setting, steps)
        name = folder_name(setting.name, first, experiment)
        if not results.is_finished(name):
            if time.monotonic() > stop:
                raise PreemptedError(f"{minutes:g} minutes are over; the same command goes on")
            with results.timed(name):
                accuracies = train_setting(pretrained, experiment, workdir / name, setting.start)
            results.add(name, accuracies)
            shown = ", ".join(f"{split} {value:.4f}" for split, value in accuracies.items())
            print(f"{setting.name}: {shown}")
        found[setting.name] = results.by_name[name]
    tried = all_rows(found, seeds)
    rows = choose_rows(tried)
    draw(rows, output / "pretraining.png")
    table = markdown_table(
        ("task", "start", "learning rate", "validation", "test", "deviation over seeds", "chosen"),
        [
            (
                row.task,
                row.start,
                f"{row.learning_rate:g}",
                f"{100 * row.validation:.1f}%",
                f"{100 * np.mean(row.test):.1f}%",
                f"{100 * np.std(row.test, ddof=min(1, seeds - 1)):.1f}",
                "yes" if row in rows else "",
            )
            for row in tried
        ],
    )
    body = (
        f"`bert_tiny` after {pretraining_steps:,} steps on WikiText-2 (held-out loss of masked "
        f"tokens {loss:.3f} nats), then {steps:,} steps of {BATCH_SIZE} labeled texts, {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}. There is one pretraining run: seeds vary the "
        "training on labels only. Both starts have the same model, tokenizer and settings. The "
        "learning rate of each is chosen by its mean validation accuracy: the figure has those."
        f"\n\n{table}"
    )
    timed = {
        name: RunResult("finished", seconds=values["seconds"]) for name, values in found.items()
    }
    plain = {"rows": [row._asdict() for row in rows], "results": found}
    write_record("pretraining", "Pretraining", body, plain, timed, folder=output)
    print(table)


if __name__ == "__main__":
    run_study(main)
