"""Every notebook is committed clean: as built from its source, without outputs or local paths."""

import pathlib
import re

import nbformat
import pytest

from bench.drills.notebooks import count_pictures, execute, warnings
from tests.colab.build import build, notebook_path, sources

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))

# Folders of personal files; the standard folders of Colab and Kaggle are not among them.
PERSONAL_FOLDERS = re.compile(r"/home/|/Users/|/root/|/tmp/|\b[A-Z]:\\")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> pathlib.Path:
    actual: pathlib.Path = request.param
    return actual


def test_notebooks_match_their_sources() -> None:
    """So they have neither outputs nor an editor's metadata."""
    assert [notebook_path(source) for source in sources()] == NOTEBOOKS
    for source in sources():
        text = notebook_path(source).read_text(encoding="utf-8")
        assert text == build(source), "run python -m tests.colab.build --write"


def test_first_cells_install_without_changing_jax(path: pathlib.Path) -> None:
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    if code[0].id == "devices":  # environment variables that JAX reads when it starts
        assert "import jax" not in code[0].source
        code = code[1:]
    look, install, doctor = (cell.source for cell in code[:3])
    assert "jax.devices()" in look
    assert "--constraint" in install
    assert "run_checks().print()" in doctor


@pytest.mark.nightly
def test_one_notebook_runs_completely(tmp_path: pathlib.Path) -> None:
    """All of them run in `bench.drills.notebooks`."""
    path = ROOT / "colab" / "survive_failures.ipynb"
    notebook = execute(path, tmp_path)
    assert warnings(notebook) == []
    assert count_pictures(notebook) == 1


def test_notebook_is_valid(path: pathlib.Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4


def test_notebook_names_no_local_folder(path: pathlib.Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not PERSONAL_FOLDERS.search(cell.source)
        for folder in (ROOT, pathlib.Path.home()):
            assert f"{folder}/" not in cell.source
