"""Every notebook is as built from its source, with outputs that name no folder of a machine."""

import pathlib
import re

import nbformat
import pytest

import docs.site.repository
from bench.drills.notebooks import count_pictures, execute, warnings
from tests.colab.build import LIST, build, listed, notebook_path, sources, without_outputs

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))

# Folders of personal files; the standard folders of Colab and Kaggle are not among them.
PERSONAL_FOLDERS = re.compile(r"/home/|/Users/|/root/|/tmp/|\b[A-Z]:\\")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> pathlib.Path:
    actual: pathlib.Path = request.param
    return actual


def test_notebooks_match_their_sources() -> None:
    """In all but outputs, so that none has an editor's metadata."""
    assert [notebook_path(source) for source in sources()] == NOTEBOOKS
    for source in sources():
        written = without_outputs(notebook_path(source))
        assert written == build(source), "run python -m tests.colab.build --write"


def test_outputs_are_text_and_small_pictures(path: pathlib.Path) -> None:
    assert path.stat().st_size < 300_000
    shown = 0
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            shown += 1
            if output.output_type == "stream":
                assert output.name == "stdout"
                assert not PERSONAL_FOLDERS.search(output.text)
                assert "\x1b" not in output.text
            else:
                assert list(output.data) == ["image/png"]
    assert shown, f"run python -m tests.colab.build --run {path.stem}"


def test_badge_and_git_address_come_from_one_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project.urls]\nRepository = "https://github.com/me/mine.git/"\n')
    monkeypatch.setattr(docs.site.repository, "PYPROJECT", project)
    title, *_, install = build(sources()[0]).cells[:4]
    badge = (
        "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        "(https://colab.research.google.com/github/me/mine/blob/main/colab/classify_and_tag.ipynb)"
    )
    assert title.source.splitlines()[2] == badge
    assert 'REPOSITORY = "git+https://github.com/me/mine"' in install.source
    page = LIST.read_text("utf-8")
    assert f"(../colab/classify_and_tag.ipynb) {badge} |" in listed(page)
    project.write_text("[project]\n")
    assert listed(listed(page)) == listed(page)
    assert "badge" not in build(sources()[0]).cells[0].source


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
