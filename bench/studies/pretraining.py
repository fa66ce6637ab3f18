"""Pretraining: masked language modeling on WikiText-2 before TREC and SST-2, or no pretraining.

    python -m bench.studies.pretraining --data DATA [--steps 1000] [--seeds 5] [--minutes 10]

`bert_tiny` (2 layers of width 128) is trained on WikiText-2 once. Then the same model, with a new
head for labels, is trained on each task from those weights (`fit --init-from`) and from nothing,
with the same tokenizer, dropout, steps, batches and learning rates. Each start has the learning
rate that gives it the better mean validation accuracy.

DATA holds `wikitext-2/`, `trec/` and `sst2/`. Runs are folders of --workdir, named by a digest of
their settings, and results are in `results.json` there, not in docs/results/runs: the tokenizer of
the second runs is a file of the first. The same command goes on where it was stopped.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import train
from bench.command import command
from bench.studies.finished_runs import digest
from bench.studies.record import NO_LIMIT, Page, QueueFlags, markdown_table, over_seeds, write_page
from train.config.experiment_files import find_experiment
from train.data.data_config import TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.figures import BLACK, BLUE, GREY
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.runtime.signals import PreemptedError
from train.runtime.writing import write_atomically
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


def result_of(
    file: Path, name: str, *experiments: Experiment, **options: Any
) -> tuple[train.Run, dict[str, float]]:
    """Train the last of the experiments, if that is not done; return the run and its result.

    Args:
      file: The results of the work folder, by the name of the run's folder.
      name: First part of the name of the run's folder.
      experiments: The run, after that which it starts from, which decides its tokenizer.
      options: Of `train.fit`.
    """
    found = json.loads(file.read_text()) if file.exists() else {}
    folder = f"{name}-{digest(*experiments)}"
    start = time.monotonic()
    run = train.fit(experiments[-1], file.parent / folder, quiet=True, **options)
    if folder not in found:
        values = {"loss": run.final_metrics["loss"]}
        if len(experiments) > 1:
            values = {split: run.evaluate(split)["accuracy"] for split in ("validation", "test")}
        found[folder] = {"seconds": time.monotonic() - start, **values}
        write_atomically(file, json.dumps(found, indent=1) + "\n")
        print(f"{name}: {', '.join(f'{split} {value:.4f}' for split, value in values.items())}")
    return run, found[folder]


class Row(NamedTuple):
    """A start of a task at a learning rate."""

    task: str
    start: str
    learning_rate: float
    validation: float
    test: list[float]
    """Test accuracy of each seed."""


def all_rows(found: Mapping[str, Mapping[str, float]], seeds: int) -> list[Row]:
    """Return each task and start at each learning rate."""
    rows = []
    for task in TASKS:
        for start in STARTS:
            for rate in LEARNING_RATES:
                runs = [found[Setting(task, start, rate, seed).name] for seed in range(seeds)]
                validation = float(np.mean([each["validation"] for each in runs]))
                rows.append(Row(task, start, rate, validation, [each["test"] for each in runs]))
    return rows


def draw(rows: list[Row]) -> Figure:
    """Draw the test accuracy of every seed, and the means."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for number, row in enumerate(rows):
        color = BLUE if row.start == "pretrained" else GREY
        percent = 100 * np.array(row.test)
        axes.bar(number, percent.mean(), color=color, width=0.6)
        axes.plot([number] * len(percent), percent, "_", color=BLACK, markersize=10)
        axes.annotate(
            f"{percent.mean():.1f}",
            (number, percent.max()),
            (0, 5),
            ha="center",
            textcoords="offset points",
        )
    names = [f"{row.task}\n{row.start.replace('nothing', 'from nothing')}" for row in rows]
    axes.set_xticks(range(len(rows)), names)
    axes.set(ylabel="test accuracy (%): mean, and each seed", ylim=(0, 100))
    axes.grid(visible=False, axis="x")
    return figure


def write(
    found: Mapping[str, Mapping[str, float]],
    file: Path,
    *,
    pretraining_steps: int,
    steps: int,
    seeds: int,
    keep_origin: bool,
) -> None:
    """Write the page from the results by `Setting.name`, and of the run `pretrained`."""
    tried = all_rows(found, seeds)
    rows = [
        max((row for row in tried if row[:2] == (task, start)), key=lambda row: row.validation)
        for task in TASKS
        for start in STARTS
    ]
    best = {row[:2]: f"{100 * np.mean(row.test):.1f}%" for row in rows}
    table = [
        [
            row.task,
            row.start,
            f"{row.learning_rate:g}",
            f"{100 * row.validation:.1f}",
            over_seeds(100 * np.array(row.test), 1),
            "yes" if row in rows else "",
        ]
        for row in tried
    ]
    header = ("task", "start", "learning rate", "validation (%)", "test (%)", "chosen")
    page = Page(
        title="Pretraining",
        question="What does masked language modeling on WikiText-2 add to TREC and SST-2?",
        answer=(
            f"TREC: {best['trec', 'pretrained']} of the test questions with it and "
            f"{best['trec', 'nothing']} from nothing. SST-2: {best['sst2', 'pretrained']} and "
            f"{best['sst2', 'nothing']} of the test sentences."
        ),
        table=markdown_table(header, table),
        settings=(
            f"`bert_tiny` after {pretraining_steps:,} steps on WikiText-2 (held-out loss of masked "
            f"tokens {found['pretrained']['loss']:.3f} nats), then {steps:,} steps of {BATCH_SIZE} "
            f"labeled texts, {seeds} {'seed' if seeds == 1 else 'seeds'}: mean and standard "
            "deviation. There is one pretraining run: seeds vary the training on labels only. Both "
            "starts have the same model, tokenizer and settings. The learning rate of each is "
            "chosen by its mean validation accuracy: the figure has those."
        ),
    )
    seconds = round(sum(each["seconds"] for each in found.values()))
    plain = {"rows": [row._asdict() for row in rows], "results": found}
    record = {"runs": len(found), "seconds": seconds}
    write_page(file, page, draw(rows), record, plain, keep_origin=keep_origin)


@command
def main(
    data: Path,
    pretraining_steps: int = 4000,
    steps: int = 1000,
    seeds: int = 5,
    queue: QueueFlags = NO_LIMIT,
) -> None:
    """What does masked language modeling on WikiText-2 add to TREC and SST-2?"""
    stop = time.monotonic() + 60 * queue.minutes if queue.minutes else float("inf")
    data, workdir = data.resolve(), queue.workdir or Path("runs/pretraining")
    workdir.mkdir(parents=True, exist_ok=True)
    file = workdir / "results.json"
    first = pretraining_experiment(data, pretraining_steps)
    pretrained, result = result_of(file, "pretrained", first)
    found = {"pretrained": result}
    for seed in range(seeds):
        for task in TASKS:
            for start in STARTS:
                for rate in LEARNING_RATES:
                    if time.monotonic() > stop:
                        minutes = f"{queue.minutes:g} minutes are over"
                        raise PreemptedError(f"{minutes}; the same command goes on")
                    setting = Setting(task, start, rate, seed)
                    second = task_experiment(pretrained, data, setting, steps)
                    init = str(pretrained.folder.path) if start == "pretrained" else ""
                    _, found[setting.name] = result_of(
                        file, setting.name, first, second, init_from=init
                    )
    options: dict[str, Any] = {"pretraining_steps": pretraining_steps, "steps": steps}
    page_file = queue.output / "pretraining.json"
    write(found, page_file, **options, seeds=seeds, keep_origin=False)


if __name__ == "__main__":
    sys.exit(main())
