"""Translation systems: what is trained, scores by length, the page of results made by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.studies import translators
from bench.studies.finished_runs import FinishedRuns
from bench.studies.translators import (
    BEYOND,
    SYSTEMS,
    by_length,
    group_names,
    make_experiment,
    summaries,
)
from train.data.example_configs import BitextDataConfig
from train.optim.schedules import ScheduleConfig
from train.sweep.grid import SweepRun
from train.sweep.sweep_folder import RunResult


def test_each_group_of_lengths_has_its_own_bleu() -> None:
    sources = [" ".join(["wort"] * count) for count in (5, 9, 10, 13, 14, 17, 18, 40)]
    references = [f"the {number} of them sit on a mat" for number in range(8)]
    actual = list(references)
    actual[2] = actual[3] = "nothing like it at all"
    scores = by_length(sources, actual, references)
    assert len(scores) == len(BEYOND) + 1 == len(group_names())
    assert scores[0] == scores[2] == scores[3] == pytest.approx(100)
    assert scores[1] < 10


def test_systems_read_the_same_text_for_as_many_steps(tmp_path: Path) -> None:
    made = [make_experiment(name, tmp_path, 400, 2) for name in SYSTEMS]
    assert {(each.steps, each.seed, each.evaluation.every) for each in made} == {(400, 2, 0)}
    assert len({each.data for each in made}) == 1
    data = made[0].data
    assert isinstance(data, BitextDataConfig)
    assert data.test_path == str(tmp_path / "raw" / "test_2016_flickr")
    for each in made:  # a fifth of a short run at most
        assert isinstance(each.schedule, ScheduleConfig)
        assert each.schedule.warmup_steps == 80
    assert make_experiment("gnmt", tmp_path, 3000, 0).schedule == SYSTEMS["gnmt"].schedule


def test_several_seeds_have_a_deviation() -> None:
    values = np.array([[10.0, 2.0], [14.0, 2.0]])
    assert summaries(values, 1) == ["12.0 ± 2.8", "2.0 ± 0.0"]
    assert summaries(values[:1], 1) == ["10.0", "2.0"]


def test_page_has_a_row_for_each_system_and_number_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_all(
        runs: list[SweepRun], workdir: Path, records: FinishedRuns, **options: Any
    ) -> dict[str, RunResult]:
        results = {}
        for run in runs:
            seed = run.experiment.seed
            results[run.name] = RunResult("finished", "loss", True, {"loss": 2.0 + seed}, seconds=9)
            measured = {"bleu": 20.0 + seed, "by_length": [4, 3, 2, 1 + seed], "translating": 3}
            records.add(run, results[run.name], measured)
        return results

    monkeypatch.setattr(translators, "train_all", train_all)
    translators.main(
        tmp_path,
        systems=("luong", "transformer"),
        seeds=2,
        output=tmp_path / "out",
    )
    page = (tmp_path / "out" / "translators.md").read_text().splitlines()
    [header, _, *rows] = [line.split(" | ") for line in page if line.startswith("| ")][:5]
    assert header[3] == "BLEU"
    assert [row[1:4] for row in rows] == [
        ["1,000", "2", "20.5 ± 0.7"],
        ["400", "2", "20.5 ± 0.7"],
        ["3,000", "1", "20.0"],
    ]
    assert rows[0][7:11] == ["1.5 ± 0.7", "2.500 ± 0.707", "9", "3"]
    data = json.loads((tmp_path / "out" / "translators.json").read_text())
    assert data["bleu_by_length"]["luong,1000"] == [[4, 3, 2, 1], [4, 3, 2, 2]]
    assert (tmp_path / "out" / "translators.png").exists()

    # No run counts twice where the usual steps are those of the recipe.
    translators.main(tmp_path, systems=("luong",), seeds=2, steps=3000, output=tmp_path / "once")
    page = (tmp_path / "once" / "translators.md").read_text().splitlines()
    [row] = [line.split(" | ") for line in page if line.startswith("| LSTMs")]
    assert row[1:4] == ["3,000", "2", "20.5 ± 0.7"]
