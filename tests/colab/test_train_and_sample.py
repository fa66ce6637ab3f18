"""The introductory notebook: single cells, and two complete executions."""

import dataclasses
import importlib.util
import pathlib
import re
import sys
import tempfile
import types
from importlib import metadata
from typing import Any

import jax
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import train
from bench.drills.notebooks import execute as execute_notebook
from bench.drills.notebooks import warnings
from train.config.experiment_files import find_experiment
from train.experiment import Experiment
from train.run_folder.folder import RunFolder
from train.telemetry.event_log import EventLog
from train.telemetry.metrics_log import read_metrics
from transformer import Precision

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / "colab" / "train_and_sample.ipynb"
ADDRESS = "git+https://example.org/project"

# A cell put after the one tagged `parameters`, as papermill does.
TINY = """TEXT, EVERY, BATCH_SIZE, LENGTH, D_MODEL, LAYERS = 'text', 10, 2, 16, 24, 2
STEPS, CHEATING_STEPS = {steps}, 10"""


class Shell:
    """Stub of IPython that records the magics that a cell calls."""

    def __init__(self) -> None:
        self.magics: list[tuple[str, str]] = []

    def run_line_magic(self, name: str, line: str) -> None:
        self.magics.append((name, line))


def source(name: str) -> str:
    cells = {cell.id: cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells}
    text: str = cells[name].source
    return text


def execute(text: str, **names: Any) -> dict[str, Any]:
    """Run the text of a cell; return the resulting names."""
    exec(TransformerManager().transform_cell(text), names)
    return names


def test_project_checkout_is_not_reinstalled() -> None:
    shell = Shell()
    execute(source("install"), get_ipython=lambda: shell)
    assert shell.magics == []


@pytest.fixture
def new_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the current folder, where the project is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    return tmp_path / "working"


def installed(*changes: tuple[str, str]) -> list[str]:
    """Return the words of the `pip` call of the cell `install`."""
    shell, text = Shell(), source("install")
    for replaced, by in changes:
        assert replaced in text
        text = text.replace(replaced, by)
    names = execute(text, get_ipython=lambda: shell)
    [(magic, line)] = shell.magics
    assert magic == "pip"
    return line.format(**names).split()


def test_installation_keeps_the_jax_version(new_machine: pathlib.Path) -> None:
    words = installed(('REPOSITORY = ""', f'REPOSITORY = "{ADDRESS}"'))
    *words, option, constraints, address = words
    assert words == ["install", "--quiet"]  # and no --upgrade
    assert (option, address) == ("--constraint", ADDRESS)
    held = pathlib.Path(constraints).read_text().splitlines()
    kept = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    assert {f"{name}=={metadata.version(name)}" for name in kept} <= set(held)
    assert len(held) == len({each.name for each in metadata.distributions() if each.name})


def test_missing_address_names_the_setting(new_machine: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="REPOSITORY: is empty"):
        execute(source("install"))


def test_installation_from_the_checkout_around_the_notebook(
    new_machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    assert installed()[-1] == str(ROOT)


@pytest.mark.parametrize(
    "name",
    [
        "working/linen-transformer-main.zip",
        "content/linen-transformer.tar.gz",
        "input/project/linen_transformer-0.1.0-py3-none-any.whl",
        "input/datasets/you/project/versions/1/files/linen-transformer.zip",
    ],
)
def test_uploaded_archive_comes_before_the_address(new_machine: pathlib.Path, name: str) -> None:
    machine = new_machine.parent
    (machine / name).parent.mkdir(parents=True, exist_ok=True)
    (machine / name).touch()
    address = ('REPOSITORY = ""', f'REPOSITORY = "{ADDRESS}"')
    assert installed(address, *hosts_below(machine))[-1] == str(machine / name)


@pytest.mark.parametrize("folder", ["project", "datasets/you/project/linen-transformer-main"])
def test_installation_of_an_archive_that_kaggle_has_unpacked(
    new_machine: pathlib.Path, folder: str
) -> None:
    """It is a copy, since the input folder is read-only."""
    project = new_machine.parent / "input" / folder
    project.mkdir(parents=True)
    (project / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    found = pathlib.Path(installed(*hosts_below(new_machine.parent))[-1])
    assert (found.name, (found / "pyproject.toml").is_file()) == ("project", True)
    assert "input" not in found.parts


def hosts_below(machine: pathlib.Path) -> list[tuple[str, str]]:
    """Return the changes that put the folders of Colab and Kaggle below another."""
    return [('"/content"', f'"{machine}/content"'), ('"/kaggle/input"', f'"{machine}/input"')]


def test_first_cell_shows_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    execute(source("look"))
    devices = jax.devices()
    shown = f"{len(devices)} x {devices[0].device_kind} (cpu), jax {jax.__version__}\n"
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("variable", "on_drive", "folder"),
    [
        ("COLAB_RELEASE_TAG", True, "/content/drive/MyDrive/runs/mine"),
        ("COLAB_RELEASE_TAG", False, "runs/mine"),
        ("KAGGLE_KERNEL_RUN_TYPE", True, "/kaggle/working/runs/mine"),
        ("ELSEWHERE", True, "runs/mine"),
    ],
)
def test_run_folder_outlives_the_machine(
    monkeypatch: pytest.MonkeyPatch, variable: str, on_drive: bool, folder: str
) -> None:
    for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "something")
    mounted: list[str] = []
    colab = types.ModuleType("google.colab")
    colab.__dict__["drive"] = types.SimpleNamespace(mount=mounted.append)
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    names = execute(source("folder"), NAME="mine", KEEP_ON_DRIVE=on_drive, pathlib=pathlib)
    assert names["workdir"] == folder
    assert mounted == (["/content/drive"] if "drive" in folder else [])


def test_settings_match_the_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Experiment, str]] = []
    monkeypatch.setattr(train, "fit", lambda *arguments: asked.append(arguments))
    execute(source("settings") + "\n" + source("train"), workdir="there")
    [(experiment, workdir)] = asked
    quickstart = find_experiment("quickstart")
    model = dataclasses.replace(quickstart.model, precision=Precision.parse("auto"))
    assert experiment == dataclasses.replace(quickstart, model=model)
    assert workdir == "there"


@pytest.mark.colab
def test_notebook_runs_completely_and_resumes(tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(7):
        words = (f"{n} times {number} is {n * number}.\n" for n in range(100))
        (text / f"{number}.txt").write_text("".join(words))

    first = run_notebook(tmp_path, steps=20)
    check_outputs(first)
    folder = RunFolder.open_existing(tmp_path / "runs" / "quickstart")
    before = read_metrics(folder.metrics)
    assert steps_of(before) == [10, 20]

    # Two devices, like Kaggle's pair of GPUs: a run may resume on other hardware.
    second = run_notebook(tmp_path, steps=30, devices=2)
    check_outputs(second)
    after = read_metrics(folder.metrics)
    assert after[: len(before)] == before
    assert steps_of(after) == [10, 20, 30]
    events = [(line["event"], line["step"]) for line in EventLog(folder.event_log).read()]
    assert events == [("started", 0), ("finished", 20), ("resumed", 20), ("finished", 30)]


def run_notebook(folder: pathlib.Path, *, steps: int, devices: int = 1) -> Any:
    """Execute all cells in `folder`; return the notebook with outputs."""
    environment = {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "TRANSFORMER_CACHE": str(folder / "cache"),
    }
    return execute_notebook(
        NOTEBOOK, folder, parameters=TINY.format(steps=steps), environment=environment
    )


def check_outputs(notebook: Any) -> None:
    """Check that images and texts exist and that nothing warned."""
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    assert warnings(notebook) == []
    for name in ("curve", "attention"):
        assert any("image/png" in each.get("data", {}) for each in outputs[name]), name
    said = "".join(each.get("text", "") for each in outputs["sample"])
    assert said.count("--- temperature") == 6
    said = "".join(each.get("text", "") for each in outputs["mask"])
    assert re.search(r"Held-out bits a byte: [\d.]+ without the mask, [\d.]+ with it\.", said)
    assert "Its sample: " in said


def steps_of(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if line["split"] == "train"]
