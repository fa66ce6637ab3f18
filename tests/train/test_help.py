"""What the command line shows for help, and that it loads no JAX for it."""

import subprocess
import sys

import pytest

from tests.train.support import command
from train.cli import VERBS, usage
from train.registry import find

Capture = pytest.CaptureFixture[str]

HEAVY = ("jax", "flax", "numpy", "optax", "orbax", "transformer")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("--help", f"{usage()}\n"),
        *((f"{verb} --help", f"usage: python -m train {verb}") for verb in VERBS),
        ("fit --json -h", "usage: python -m train fit CONFIG"),
        *((f"{verb} W --help", "show this help") for verb in ("evaluate", "sample", "goodput")),
    ],
)
def test_help_needs_no_jax(line: str, shown: str) -> None:
    program = (
        "import sys\n"
        "from train.cli import main\n"
        "try:\n"
        f"    main({line.split()})\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0, stop.code\n"
        f"heavy = set({HEAVY}) & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert shown in ran.stdout


def test_help_names_every_verb(capsys: Capture) -> None:
    for flag in ("-h", "--help"):
        found = command(capsys, flag)
        assert (found.status, found.error) == (0, "")
        assert all(f"python -m train {verb}" in found.output for verb in VERBS)
    assert command(capsys).status == 2


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_has_help(capsys: Capture, verb: str) -> None:
    found = command(capsys, verb, "--help")
    assert (found.status, found.error) == (0, "")
    assert found.output.startswith(f"usage: python -m train {verb}")


def test_the_settings_of_a_config_have_help(capsys: Capture) -> None:
    found = command(capsys, "fit", "quickstart", "--help")
    assert (found.status, found.error) == (0, "")
    assert "--steps INT" in found.output
    assert f"Updates of the weights. (default: {find('quickstart').steps})" in found.output
    assert "--model.width" in found.output
