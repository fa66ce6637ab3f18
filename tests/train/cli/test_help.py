"""Help texts of the command line, which are shown without loading JAX."""

import pkgutil
import runpy
import subprocess
import sys

import pytest

import configs
from tests.train.support import command
from train.cli.main import VERBS, usage
from train.config.experiment_files import find_experiment

Capture = pytest.CaptureFixture[str]

HEAVY = ("jax", "jaxlib", "flax", "numpy", "optax", "orbax")

CONFIGS = sorted(module.name for module in pkgutil.iter_modules(configs.__path__))


def imported(program: str) -> subprocess.CompletedProcess[str]:
    """Run lines of Python in a new process, which fails if they import a heavy package."""
    ending = f"heavy = set({HEAVY}) & set(sys.modules)\nassert not heavy, heavy\n"
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}{ending}"], capture_output=True, text=True
    )


CALL = """
from train.cli.main import main
try:
    main({})
except SystemExit as stop:
    assert stop.code == 0, stop.code
"""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("--help", f"{usage()}\n"),
        *((f"{verb} --help", f"usage: python -m train {verb}") for verb in VERBS),
        ("fit --json -h", "usage: python -m train fit CONFIG"),
        ("help fit", "usage: python -m train fit CONFIG"),
        *((f"{verb} W --help", "show this help") for verb in ("evaluate", "sample", "goodput")),
        *((f"{verb} -h", "show this help") for verb in ("serve", "import", "init")),
        *((f"{verb} gpt2 --help", "--batch-size INT") for verb in ("fit", "plan", "describe")),
        ("fit multi30k_recurrent --help", "--model.layer-pattern.0.mixer.kind"),
        (
            "fit gpt2 --model.layer-pattern.0.mixer.kind performer --help",
            "--model.layer-pattern.0.mixer.num-features",
        ),
    ],
)
def test_help_needs_no_jax(line: str, shown: str) -> None:
    ran = imported(CALL.format(line.split()))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert shown in ran.stdout


def test_configs_need_no_jax() -> None:
    """Load every shipped config in one process: settings import no code that computes."""
    lines = "".join(f"import configs.{name}\n" for name in CONFIGS)
    ran = imported(lines)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(CONFIGS) > 20


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
def test_help_does_not_restart_python(
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
    for flag in ("-h", "--help"):
        result = command(capsys, flag)
        assert (result.status, result.error) == (0, "")
        assert all(f"python -m train {verb}" in result.output for verb in VERBS)
    assert command(capsys).status == 2


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_has_help(capsys: Capture, verb: str) -> None:
    result = command(capsys, verb, "--help")
    assert (result.status, result.error) == (0, "")
    assert result.output.startswith(f"usage: python -m train {verb}")


def test_config_settings_have_help(capsys: Capture) -> None:
    result = command(capsys, "fit", "quickstart", "--help")
    assert (result.status, result.error) == (0, "")
    assert "--steps INT" in result.output
    steps = find_experiment("quickstart").steps
    assert f"Number of weight updates. (default: {steps})" in result.output
    assert "--model.d-model" in result.output
