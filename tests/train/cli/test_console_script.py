"""The console script `linen-transformer`, in folders with files named like our packages."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.train.support import write_config

ROOT = Path(__file__).resolve().parents[3]

FOREIGN = "raise AssertionError('a file of the user was imported')\n"


def script(folder: Path) -> Path:
    """Write the script that pip creates for the entry point in pyproject.toml."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["linen-transformer"].partition(":")
    file = folder / "bin" / "linen-transformer"
    file.parent.mkdir()
    file.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return file


def run(cwd: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder.

    Our packages come after the folder on the path, as installed ones do.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, *map(str, command)]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a `train.py`, a `configs/` and a `transformer/` that must not be
    imported.
    """
    project = tmp_path / "project"
    for file in ("train.py", "configs/__init__.py", "transformer/__init__.py"):
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).write_text(FOREIGN)
    return project


def test_script_ignores_local_packages(folder: Path) -> None:
    program = script(folder.parent)
    result = run(folder, program, "fit", "quickstart", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert "usage: linen-transformer fit quickstart" in result.stdout
    wrong = run(folder, program, "fit", "quickstart", "--stepz", "3")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert wrong.stderr.endswith("see linen-transformer fit quickstart --help\n")


def test_shadowed_package_is_a_one_line_error(folder: Path) -> None:
    (folder / "train.py").unlink()
    result = run(folder, "-m", "train", "fit", "quickstart", "--help")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {folder}/transformer/__init__.py and {folder}/configs/__init__.py: imported in "
        "place of linen-transformer's own transformer and configs; start linen-transformer instead "
        "of python -m train, or rename it\n"
    )
    safe = run(folder, "-P", "-m", "train", "fit", "quickstart", "--help")
    assert (safe.returncode, safe.stderr) == (0, "")


def test_shadowed_configs_are_named_and_other_verbs_work(folder: Path) -> None:
    (folder / "configs" / "__init__.py").write_text("")
    for file in ("train.py", "transformer/__init__.py"):
        (folder / file).unlink()
    config = write_config(folder)
    result = run(folder, "-m", "train", "fit", config, "--help")
    assert result.returncode == 0
    assert result.stderr == (
        f"note: {folder}/configs/__init__.py: imported in place of linen-transformer's own "
        "configs; start linen-transformer instead of python -m train, or rename it\n"
    )


def test_fit_with_the_script(folder: Path) -> None:
    program, config = script(folder.parent), write_config(folder)
    (folder / "helper.py").write_text("STEPS = 2\n")
    with Path(config).open("a") as file:
        file.write("import helper\nEXPERIMENTS['short'] = tiny(Path('.'), steps=helper.STEPS)\n")
    for line in (("fit", f"{config}:short", "--workdir", "run"), ("evaluate", "run")):
        result = run(folder, program, *line, "--json")
        assert (result.returncode, result.stderr, json.loads(result.stdout)["step"]) == (0, "", 2)
