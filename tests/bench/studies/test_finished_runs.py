"""Finished runs are found by their settings, and by no others."""

import dataclasses
import json
from pathlib import Path

from bench.studies.finished_runs import FinishedRuns
from bench.studies.record import sweep_run
from train.config.experiment_files import find_experiment
from train.sweep.sweep_folder import RunResult


def test_run_is_found_by_its_settings_alone(tmp_path: Path) -> None:
    base = find_experiment("quickstart")
    assert isinstance(base.model.initialization.std, int)  # a config may write 0 for 0.0
    run = sweep_run({"seed": "0"}, base)
    result = RunResult("finished", metric="loss", metrics={"loss": 2.5})
    FinishedRuns(tmp_path / "runs.jsonl").add(run, result, {"bleu": 3})
    records = FinishedRuns(tmp_path / "runs.jsonl")
    same = dataclasses.replace(base, name="another name", log_every=7)
    found = records.find(sweep_run({}, same))
    assert found is not None
    assert (found.result.value, found.measured) == (2.5, {"bleu": 3})
    assert records.find(sweep_run({}, dataclasses.replace(base, steps=base.steps + 1))) is None
    assert records.find(dataclasses.replace(run, warm_start={"init_from": "runs/first"})) is None


def test_run_from_before_a_setting_existed_had_its_default(tmp_path: Path) -> None:
    base, file = find_experiment("quickstart"), tmp_path / "runs.jsonl"
    FinishedRuns(file).add(sweep_run({}, base), RunResult("finished"), {})
    first, line = file.read_text().splitlines()
    fields = json.loads(first)
    del fields["base"]["model.layer_pattern.0.residual"]
    file.write_text(json.dumps(fields) + f"\n{line}\n")
    records = FinishedRuns(file)
    assert records.find(sweep_run({}, base)) is not None
    [block] = base.model.layer_pattern
    without = dataclasses.replace(block, residual=False)
    model = dataclasses.replace(base.model, layer_pattern=(without,))
    assert records.find(sweep_run({}, dataclasses.replace(base, model=model))) is None
