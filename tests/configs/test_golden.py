import pytest

from tests.configs.renew import FOLDER, golden
from train.registry import find, names
from train.settings import from_plain, to_plain

RENEW = "if that is as it should be: python -m tests.configs.renew"


@pytest.mark.parametrize("name", sorted(golden()))
def test_an_experiment_is_what_its_golden_file_says(name: str) -> None:
    assert golden()[name] == (FOLDER / name).read_text(), RENEW


def test_every_golden_file_has_its_experiment() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(golden()), RENEW


@pytest.mark.parametrize("name", names())
def test_an_experiment_is_read_back_as_it_was_saved(name: str) -> None:
    assert from_plain(to_plain(find(name)), name) == find(name)


def test_runs_of_shipped_experiments_get_folders_of_their_own() -> None:
    folders = [find(name).name for name in names()]
    assert len(set(folders)) == len(folders)
