"""Help texts of the command line, which are shown without loading JAX."""

import importlib
import re
import runpy
import subprocess
import sys

import pytest

from tests.train.support import command
from train.cli.main import VERBS
from train.config.experiment_files import find_experiment
from train.config.shipped import shipped_configs

Capture = pytest.CaptureFixture[str]

HEAVY = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax")

LINES = [
    "--help",
    "fit --json -h",
    "help fit",
    "configs",
    "configs --json",
    "completion bash",
    "nonsense",
]

PROGRAM = """
import sys
from train.cli.main import main
for line in {lines}:
    try:
        main(line.split())
    except SystemExit as stop:
        assert stop.code == (2 if line == "nonsense" else 0), line
heavy = set({heavy}) & set(sys.modules)
assert not heavy, heavy
"""


def test_lists_and_help_answer_without_jax() -> None:
    program = PROGRAM.format(lines=LINES, heavy=HEAVY)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.startswith("error: verb nonsense: is not known")


def test_names_are_read_as_the_configs_define_them() -> None:
    for config in shipped_configs():
        module = importlib.import_module(f"configs.{config.name}")
        assert config.experiments == tuple(module.EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        (["fit", "gpt2", "--help"], False),
        (["fit", "-h"], False),
        (["fit", "gpt2"], True),
        (["sample", "runs/a"], True),
        (["plan", "gpt2"], False),
    ],
)
def test_only_verbs_that_run_a_model_restart_python(
    arguments: list[str], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(
        "train.runtime.startup.restart_with_huge_pages", lambda: started.append(True)
    )
    monkeypatch.setattr("train.cli.main.main", lambda: None)
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    runpy.run_module("train", run_name="__main__")
    assert bool(started) == starts


def test_help_names_every_verb(capsys: Capture) -> None:
    result = command(capsys, "-h")
    assert (result.status, result.error) == (0, "")
    assert all(f"python -m train {verb}" in result.output for verb in VERBS)
    assert command(capsys).status == 2


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_has_help(capsys: Capture, verb: str) -> None:
    result = command(capsys, verb, "--help")
    assert (result.status, result.error) == (0, "")
    assert result.output.startswith(f"usage: python -m train {verb}")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("help fit", "usage: python -m train fit CONFIG"),
        ("evaluate W --help", "--split STR"),
        ("evaluate --help", "Folder of the run."),
        ("describe quickstart --help optimizer", "--optimizer.weight-decay"),
        ("describe quickstart --help-all", "--recovery.window"),
        (
            "fit quickstart --help",
            f"Number of weight updates. (default: {find_experiment('quickstart').steps})",
        ),
        ("fit multi30k_recurrent --help", "--model.layer-pattern.0.mixer.kind"),
        (
            "fit gpt2 --model.layer-pattern.0.mixer.kind performer --help-all",
            "--model.layer-pattern.0.mixer.num-features",
        ),
    ],
)
def test_help_lists_the_settings(capsys: Capture, line: str, shown: str) -> None:
    result = command(capsys, *line.split())
    assert (result.status, result.error) == (0, "")
    assert shown in result.output


def test_help_without_a_part_has_what_many_people_change(capsys: Capture) -> None:
    shown = command(capsys, "describe", "quickstart", "--help").output
    settings = set(re.findall(r"^\W*(--[a-z][\w.-]*)", shown, re.MULTILINE)) - {"--json"}
    contract = "--steps --batch-size --seed --data.path --log-every --checkpoint.every"
    assert settings >= {*contract.split(), "--mesh.data", "--schedule.learning-rate"}
    assert 20 <= len(settings) <= 25
    part = command(capsys, "describe", "quickstart", "--help", "mesh").output
    assert "--mesh.optimizer-placement" in part
    assert "--steps" not in part
