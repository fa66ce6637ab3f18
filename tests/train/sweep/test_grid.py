"""Grids of settings: fields, flags, names and order of the runs."""

import dataclasses
from collections.abc import Sequence

import pytest

from train.config.experiment_files import find_experiment
from train.config.io import flatten_experiment
from train.errors import UsageError
from train.experiment import Experiment
from train.sweep.grid import (
    expand_grid,
    find_field,
    flag,
    known_fields,
    parse_grid,
    run_name,
    short_names,
)

BASE = find_experiment("quickstart")


def build(flags: Sequence[str]) -> Experiment:
    """Stand in for the command line: two fields are enough."""
    changes = dict(each.removeprefix("--").split("=") for each in flags)
    return dataclasses.replace(
        BASE, steps=int(changes["steps"]), batch_size=int(changes["batch-size"])
    )


def test_runs_are_all_combinations_with_seeds_outermost() -> None:
    grid = {"steps": ["5", "10"], "batch_size": ["4", "8"]}
    runs = expand_grid(grid, 2, dataclasses.replace(BASE, seed=7), build)
    # `build` returns the seed of BASE, which is 0.
    assert [run.name for run in runs[:4]] == [
        "steps=5,batch_size=4,seed=0",
        "steps=5,batch_size=8,seed=0",
        "steps=10,batch_size=4,seed=0",
        "steps=10,batch_size=8,seed=0",
    ]
    assert [run.experiment.seed for run in runs] == [0] * 4 + [1] * 4
    assert [run.cost for run in runs[:4]] == [20, 40, 40, 80]
    assert runs[5].experiment == dataclasses.replace(BASE, steps=5, batch_size=8, seed=1)
    assert runs[5].settings == {"steps": "5", "batch_size": "8"}


def test_lists_are_one_field() -> None:
    grid = parse_grid(["targets=query+value,all"], BASE)
    assert grid == {"lora.targets": ["query+value", "all"]}
    current = known_fields(BASE)["lora.targets"]
    assert flag("lora.targets", "query+value", current) == "--lora.targets=query,value"
    assert not any(name.startswith("lora.targets.") for name in known_fields(BASE))


def test_fields_by_path_alias_and_last_name() -> None:
    known = flatten_experiment(BASE)
    assert find_field("model.d_model", known) == "model.d_model"
    assert find_field("d_model", known) == "model.d_model"
    assert find_field("optimizer.learning_rate", known) == "schedule.learning_rate"
    assert find_field("learning_rate", known) == "schedule.learning_rate"
    assert find_field("lr", known) == "schedule.learning_rate"


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["steps"], "--set steps: has no values; write --set FIELD=A,B"),
        (["seed=1,2"], "write --seeds N"),
        (["steps=1", "steps=2"], "steps is given twice"),
        (["bias=True"], "is the name of several settings; choose one of"),
        (["model.d_modle=8"], "is not a setting of this config; choose one of model.d_model"),
        (["qqqq=8"], "is not a setting of this config; see fit CONFIG --help"),
    ],
)
def test_errors(assignments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_grid(assignments, BASE)
    assert message in str(error.value)


def test_assignments_keep_their_order_without_duplicates() -> None:
    grid = parse_grid(["--schedule.learning-rate=3e-3, 1e-3,3e-3", "steps=5"], BASE)
    assert grid == {"schedule.learning_rate": ["3e-3", "1e-3"], "steps": ["5"]}


def test_flags() -> None:
    assert flag("model.d_model", "8", 4) == "--model.d-model=8"
    assert flag("model.causal", "False", True) == "--model.no-causal"
    assert flag("debug_checks", "true", False) == "--debug-checks"
    with pytest.raises(UsageError, match="is True or False"):
        flag("model.causal", "1", True)


def test_names_are_short_safe_and_distinct() -> None:
    assert short_names(["a.rate", "b.rate", "a.width"]) == {
        "a.rate": "a.rate",
        "b.rate": "b.rate",
        "a.width": "width",
    }
    assert run_name({"data.path": "/a b/*.txt"}, 3) == "path=_a_b_.txt,seed=3"
    long = [run_name({"data.path": letter * 300}, 0) for letter in "ab"]
    assert len(set(long)) == 2
    assert all(len(name) < 200 for name in long)


def test_duplicate_run_names_raise() -> None:
    with pytest.raises(UsageError, match="have one name"):
        expand_grid({"data.path": ["a*b", "a?b"]}, 1, BASE, lambda flags: BASE)
