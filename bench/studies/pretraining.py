"""Pretraining: masked language modeling on WikiText-2 before TREC and SST-2, or no pretraining.

`bert_tiny` (2 layers of width 128) is trained on WikiText-2 once. Then the same model, with a new
head for labels, is trained on each task from those weights (`fit --init-from`) and from nothing,
with the same tokenizer, dropout, steps, batches and learning rates. Each start has the learning
rate that gives it the better mean validation accuracy.

DATA holds `wikitext-2/`, `trec/` and `sst2/`.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import train
from bench.claims.small_runs import on_wikitext
from bench.results import over_seeds
from bench.studies.record import Study, at_the_end, markdown_table, sweep_run
from train.config.experiment_files import find_experiment
from train.data.data_config import TokenizerConfig
from train.experiment import Experiment
from train.figures import BLACK, BLUE, GREY
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.sweep.grid import SweepRun
from train.sweep.queue import check_results, run_sweep
from train.tasks.classification import Classification

FILES = {
    "trec": {"path": "TREC.train.all", "test_path": "TREC.test.all"},
    "sst2": {"path": "train.tsv", "validation_path": "dev.tsv", "test_path": "test.tsv"},
}
STARTS = ("pretrained", "nothing")
LEARNING_RATES = (3e-4, 1e-3)
PRETRAINING_STEPS, STEPS = 4000, 1000


def task_experiment(task: str, rate: float, data: Path, tokenizer: Path) -> Experiment:
    """Return a classifier with the model of `bert_tiny` and a tokenizer."""
    base = find_experiment(task)
    files: dict[str, Any] = {name: str(data / task / file) for name, file in FILES[task].items()}
    texts: Any = base.data
    model = find_experiment("bert_tiny").model
    layers = tuple(dataclasses.replace(each, residual_dropout=0.1) for each in model.layer_pattern)
    return dataclasses.replace(
        base,
        task=Classification(pooling="mean", classifier_dropout=0.1),
        model=dataclasses.replace(model, layer_pattern=layers, embedding_dropout=0.1),
        data=dataclasses.replace(
            texts, tokenizer=TokenizerConfig("file", path=str(tokenizer)), max_length=64, **files
        ),
        optimizer=AdamW(beta2=0.98, weight_decay=0.1),
        schedule=ScheduleConfig("cosine", learning_rate=rate, warmup_steps=50, min_lr_ratio=0.0),
        steps=STEPS,
        batch_size=32,
    )


def accuracies(run: SweepRun, folder: Path) -> dict[str, float]:
    """Return the accuracy on the validation and the test split."""
    loaded = train.load(str(folder))
    return {split: loaded.evaluate(split)["accuracy"] for split in ("validation", "test")}


class Row(NamedTuple):
    """A start of a task at a learning rate."""

    task: str
    start: str
    learning_rate: float
    validation: float
    test: list[float]
    """Test accuracy of each seed."""


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


def main(data: Path, seeds: int = 5, minutes: float = 0) -> None:
    """What does masked language modeling on WikiText-2 add to TREC and SST-2?"""
    study, data = Study("pretraining", minutes), data.resolve()
    settings = {"steps": str(PRETRAINING_STEPS)}
    base = on_wikitext(find_experiment("bert_tiny"), data)
    first = at_the_end(dataclasses.replace(base, steps=PRETRAINING_STEPS), base.seed)
    pretraining = sweep_run(settings, first)
    folder = study.workdir / "wikitext"
    tokenizer = (folder / pretraining.name / "tokenizer.json").resolve()
    runs = {}
    for seed, task, start, rate in itertools.product(range(seeds), FILES, STARTS, LEARNING_RATES):
        settings = {"task": task, "start": start, "rate": f"{rate:g}"}
        made = at_the_end(task_experiment(task, rate, data, tokenizer), seed, num_batches=0)
        run = sweep_run(settings, made)
        if start == "pretrained":
            run = dataclasses.replace(run, warm_start={"init_from": str(tokenizer.parent)})
        runs[task, start, rate, seed] = run
    # The first run is needed only where one that continues from it is missing.
    if not all(study.records.find(run) for run in runs.values()):
        results = run_sweep([pretraining], str(folder), limit_seconds=60 * minutes)
        check_results(results, str(folder))
    found = study.train([*runs.values()], part="tasks", measure=accuracies)
    rows = []
    for task, start, rate in itertools.product(FILES, STARTS, LEARNING_RATES):
        own = [found[runs[task, start, rate, seed].name].measured for seed in range(seeds)]
        validation = float(np.mean([each["validation"] for each in own]))
        rows.append(Row(task, start, rate, validation, [each["test"] for each in own]))
    chosen = [
        max((row for row in rows if row[:2] == pair), key=lambda row: row.validation)
        for pair in itertools.product(FILES, STARTS)
    ]
    header = ("task", "start", "learning rate", "validation (%)", "test (%)", "chosen")
    table = [
        [
            row.task,
            row.start,
            f"{row.learning_rate:g}",
            f"{100 * row.validation:.1f}",
            over_seeds(100 * np.array(row.test), 1),
            "yes" if row in chosen else "",
        ]
        for row in rows
    ]
    data_of_rows = {"rows": [row._asdict() for row in rows]}
    study.write([markdown_table(header, table)], draw(chosen), data_of_rows)
