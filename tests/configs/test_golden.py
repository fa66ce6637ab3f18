import dataclasses

import pytest

from tests.configs.golden import FOLDER, config_classes, golden
from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import experiment_from_dict, experiment_to_dict
from transformer.precision import Precision

GOLDEN = golden()

RENEW = "if the change is intended: python -m tests.configs.golden"


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_experiments_match_golden_files(name: str) -> None:
    assert GOLDEN[name] == (FOLDER / name).read_text(), RENEW


def test_every_golden_file_has_its_config() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(GOLDEN), RENEW


def test_defaults_of_used_classes_are_recorded() -> None:
    def used(value: object) -> set[type]:
        if isinstance(value, tuple):
            return set().union(*map(used, value))
        if not dataclasses.is_dataclass(value) or isinstance(value, Precision):
            return set()
        inner = (getattr(value, field.name) for field in dataclasses.fields(value))
        return {type(value)}.union(*map(used, inner))

    assert set().union(*(used(find_experiment(name)) for name in list_experiments())) <= set(
        config_classes()
    )


@pytest.mark.parametrize("name", list_experiments())
def test_experiment_round_trip(name: str) -> None:
    assert experiment_from_dict(experiment_to_dict(find_experiment(name)), name) == find_experiment(
        name
    )


def test_shipped_experiments_have_distinct_run_folders() -> None:
    folders = [find_experiment(name).name for name in list_experiments()]
    assert len(set(folders)) == len(folders)
