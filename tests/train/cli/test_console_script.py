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
    """Run Python in a folder. Our packages come after it on the path, as installed ones do."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, *map(str, command)]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)


def write_light_config(folder: Path, imports: str = "", steps: str = "2") -> str:
    """Write a config that imports no JAX, which takes a second; return its path."""
    file = folder / "own.py"
    file.write_text(
        f"from train.experiment import Experiment\n{imports}\n"
        f"EXPERIMENTS = {{'short': Experiment(steps={steps})}}\n"
    )
    return str(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with modules of our packages' names that must not be imported."""
    project = tmp_path / "project"
    for file in ("train.py", "configs/__init__.py", "transformer/__init__.py"):
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).write_text(FOREIGN)
    return project


def test_script_ignores_local_packages(folder: Path) -> None:
    program = script(folder.parent)
    wrong = run(folder, program, "fit", "quickstart", "--stepz", "3")
    assert wrong.returncode == 2
    assert "run linen-transformer fit quickstart --help" in wrong.stderr


def test_help_of_an_own_config_with_the_script(folder: Path) -> None:
    """The config reads a module beside it."""
    (folder / "helper.py").write_text("STEPS = 2\n")
    config = write_light_config(folder, "import helper", "helper.STEPS")
    result = run(folder, script(folder.parent), "fit", f"{config}:short", "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"usage: linen-transformer fit {config}:short" in result.stdout
    assert "(default: 2)" in result.stdout


@pytest.mark.full
def test_fit_with_the_script(folder: Path) -> None:
    config = write_config(folder)
    (folder / "helper.py").write_text("STEPS = 2\n")
    with Path(config).open("a") as file:
        file.write("import helper\nEXPERIMENTS['short'] = tiny(Path('.'), steps=helper.STEPS)\n")
    program = script(folder.parent)
    for line in (("fit", f"{config}:short", "--workdir", "run"), ("evaluate", "run")):
        result = run(folder, program, *line, "--json")
        assert (result.returncode, result.stderr, json.loads(result.stdout)["step"]) == (0, "", 2)
