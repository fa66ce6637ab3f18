import pytest

from tests.configs.golden import FOLDER, golden
from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import experiment_from_dict, experiment_to_dict

GOLDEN = golden()

RENEW = "if the change is intended: python -m tests.configs.golden"


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_experiments_match_golden_files(name: str) -> None:
    assert GOLDEN[name] == (FOLDER / name).read_text(), RENEW


def test_every_golden_file_has_its_config() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(GOLDEN), RENEW


def test_shipped_experiments_round_trip_and_have_distinct_run_folders() -> None:
    experiments = {name: find_experiment(name) for name in list_experiments()}
    for name, experiment in experiments.items():
        assert experiment_from_dict(experiment_to_dict(experiment), name) == experiment
    assert len({each.name for each in experiments.values()}) == len(experiments)
