"""Tables and figures of a sweep, from results made by hand."""

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from train.config.experiment_files import find_experiment
from train.sweep.grid import SweepRun, run_name
from train.sweep.summary import SweepSummary, main_field, plot_sweep, print_summary, summarize
from train.sweep.sweep_folder import RunResult

BASE = find_experiment("quickstart")
LOSSES = {("1e-3", "adamw"): (3.0, 3.5), ("1e-2", "adamw"): (2.0, 2.5), ("1e-1", "adamw"): ()}
"""Losses of the two seeds of each setting; of the last both failed."""


def make(metric: str = "loss", *, lower: bool = True) -> SweepSummary:
    runs, results = [], {}
    for seed in (0, 1):
        for (rate, kind), losses in LOSSES.items():
            settings = {"schedule.learning_rate": rate, "optimizer.kind": kind}
            experiment = dataclasses.replace(BASE, seed=seed)
            run = SweepRun(run_name(settings, seed), settings, experiment, 1.0)
            runs.append(run)
            results[run.name] = RunResult("failed", error="out of memory")
            if losses:
                actual = {metric: losses[seed], "other": 10.0 * losses[seed]}
                results[run.name] = RunResult("finished", metric, lower, actual, 5, 4.0 + seed)
    return summarize(runs, results)


def test_mean_and_spread_over_seeds_best_first() -> None:
    summary = make()
    best, second, failed = summary.settings
    assert (best.settings["schedule.learning_rate"], best.mean) == ("1e-2", 2.25)
    assert best.deviation == pytest.approx(0.5 / math.sqrt(2))
    assert best.metrics == {"loss": 2.25, "other": 22.5}
    assert best.seconds == 4.5
    assert second.mean == 3.25
    assert math.isnan(failed.mean)
    assert summary.as_dict()["failed"] == 2


def test_higher_may_be_better() -> None:
    rates = [each.settings["schedule.learning_rate"] for each in make("f1", lower=False).settings]
    assert rates == ["1e-3", "1e-2", "1e-1"]


def test_json_has_no_nan() -> None:
    plain = json.loads(json.dumps(make().as_dict(), allow_nan=False))
    assert plain["failed"] == 2
    assert plain["settings"][2]["mean"] is None
    assert [run["seed"] for run in plain["settings"][0]["runs"]] == [0, 1]
    assert plain["settings"][2]["runs"][0]["error"] == "out of memory"


def test_settings_with_a_diverged_seed_come_after_the_others() -> None:
    losses = {"1e-3": (3.0, 3.5), "1e-2": (2.0, math.nan), "1e-1": (math.nan, math.nan)}
    runs, results = [], {}
    for seed in (0, 1):
        for rate, values in losses.items():
            experiment = dataclasses.replace(BASE, seed=seed)
            run = SweepRun(f"{rate},{seed}", {"rate": rate}, experiment, 1.0)
            runs.append(run)
            metrics = {"loss": values[seed]}
            results[run.name] = RunResult("finished", "loss", True, metrics, 5, 4.0)
    results["1e-1,1"] = RunResult("failed", error="out of memory")
    summary = summarize(runs, results)
    assert [each.settings["rate"] for each in summary.settings] == ["1e-3", "1e-2", "1e-1"]
    assert (summary.as_dict()["failed"], summary.as_dict()["diverged"]) == (1, 2)
    output = io.StringIO()
    print_summary(summary, "one diverged", Console(file=output, width=100))
    rows = [" ".join(line.split()) for line in output.getvalue().splitlines() if "1e-" in line]
    for row, texts in zip(
        rows,
        (
            ("1e-3", "3.2500", "0.3536", " 4 "),
            ("1e-2", "1 (1 diverged)"),
            ("0 (1 failed, 1 diverged)",),
        ),
        strict=True,
    ):
        assert all(text in row for text in texts), row


def test_figure(tmp_path: Path) -> None:
    summary = make()
    assert main_field(summary.settings) == "schedule.learning_rate"
    assert plot_sweep(summary, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    one_kind = dataclasses.replace(summary, settings=summary.settings[:1])
    assert main_field(one_kind.settings) is None
    assert plot_sweep(one_kind, tmp_path / "one.png")
    failed = dataclasses.replace(summary, settings=summary.settings[2:])
    assert not plot_sweep(failed, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_values_are_shown_as_they_are(tmp_path: Path) -> None:
    """Brackets are markup to rich, and dollars formulas to matplotlib."""
    values = ("corpus[/v1]/a", "[ab]/*.txt", "$x^$")
    runs = [SweepRun(value, {"data.path": value}, BASE, 1.0) for value in values]
    results = {run.name: RunResult("finished", "loss", True, {"loss": 1.0}, 5, 4.0) for run in runs}
    results["$x^$"] = RunResult("finished", "loss", True, {"loss": math.nan}, 5, 4.0)
    summary = summarize(runs, results)
    output = io.StringIO()
    print_summary(summary, "a [title]", Console(file=output, width=200))
    shown = output.getvalue()
    assert all(value in shown for value in (*values, "a [title]"))
    assert plot_sweep(summary, tmp_path / "sweep.png")
    assert (summary.as_dict()["failed"], summary.as_dict()["diverged"]) == (0, 1)
