"""Help texts of the command line, which are shown without loading JAX."""

import runpy
import subprocess
import sys

import pytest

from tests.train.support import command
from train.cli.main import VERBS
from train.config.experiment_files import find_experiment

Capture = pytest.CaptureFixture[str]

HEAVY = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax")

LINES = [
    "--help",
    *(f"{verb} --help" for verb in VERBS),
    "fit --json -h",
    "help fit",
    *(f"{verb} W --help" for verb in ("evaluate", "sample", "goodput")),
    *(f"{verb} gpt2 --help" for verb in ("fit", "plan", "describe")),
    "fit multi30k_recurrent --help",
]

PROGRAM = """
import sys
from train.cli.main import main
for line in {lines}:
    try:
        main(line.split())
    except SystemExit as stop:
        assert stop.code == 0, line
heavy = set({heavy}) & set(sys.modules)
assert not heavy, heavy
"""


def test_help_needs_no_jax() -> None:
    program = PROGRAM.format(lines=LINES, heavy=HEAVY)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


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
        (
            "fit quickstart --help",
            f"Number of weight updates. (default: {find_experiment('quickstart').steps})",
        ),
        ("fit multi30k_recurrent --help", "--model.layer-pattern.0.mixer.kind"),
        (
            "fit gpt2 --model.layer-pattern.0.mixer.kind performer --help",
            "--model.layer-pattern.0.mixer.num-features",
        ),
    ],
)
def test_help_lists_the_settings(capsys: Capture, line: str, shown: str) -> None:
    result = command(capsys, *line.split())
    assert (result.status, result.error) == (0, "")
    assert shown in result.output
