"""Every notebook is committed clean: no outputs, and no data of the author's machine."""

import pathlib
import re

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))

# Where people keep what is theirs. Folders that Colab and Kaggle give to everyone are not among it.
OWN = re.compile(r"/home/|/Users/|/root/|/tmp/|\b[A-Z]:\\")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> pathlib.Path:
    found: pathlib.Path = request.param
    return found


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


def test_it_is_valid(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4


def test_it_has_no_outputs(path: pathlib.Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_it_keeps_no_trace_of_an_editor(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert set(notebook.metadata) <= {"colab", "kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata.language_info) == {"name"}
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"tags"}


def test_it_names_no_folder_of_this_machine(path: pathlib.Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not OWN.search(cell.source)
        for folder in (ROOT, pathlib.Path.home()):
            assert f"{folder}/" not in cell.source
