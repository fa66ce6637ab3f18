"""A compiler that crashes ends a plan with one line; results and errors are returned unchanged."""

import dataclasses
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest

from tests.train.support import tiny
from train.errors import UsageError, UserError
from train.estimate import compile as compile_module
from train.estimate.chips import CHIPS
from train.estimate.compile import CompiledStep, answer_request, compile_in_subprocess
from train.estimate.target import Target, parse_target, target_devices

STEP = CompiledStep(1, 2, 3, 4, 5, 6, 7, 8, (), 0.5, engine=object(), program=object())
TARGET = Target("v5e:1x1", CHIPS["v5e"], (1, 1))


def run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what the subprocess runs in this process."""

    def run(command: list[str], **_: Any) -> Any:
        try:
            answer_request(*command[-2:])
        except RuntimeError as error:
            return subprocess.CompletedProcess(command, 1, "", f"Traceback\n{error}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


def test_subprocess_returns_the_compiled_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(monkeypatch)
    compile_step = Mock(return_value=STEP)
    monkeypatch.setattr(compile_module, "compile_step", compile_step)
    experiment = tiny(tmp_path)
    returned = compile_in_subprocess(experiment, TARGET)
    assert returned == dataclasses.replace(STEP, engine=None, program=None)
    compile_step.assert_called_once_with(experiment, TARGET)


def test_unimportable_class_is_compiled_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a mixer in a user's config file. A real subprocess answers here.

    Its classes are pickled by the name of their module, although it runs as `__main__`.
    """
    module = types.ModuleType("experiment_own")
    unknown = type("Unknown", (), {"__module__": module.__name__, "__qualname__": "Unknown"})
    vars(module)["Unknown"] = unknown
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compile_module, "compile_step", lambda *arguments: STEP)
    experiment: Any = unknown()
    assert compile_in_subprocess(experiment, TARGET) is STEP


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UsageError("axis heads: does not divide"), "^axis heads: does not divide$"),
        (RuntimeError("no Mosaic module"), r"^target v5e:1x1: .*, failed \(no Mosaic module\); "),
    ],
)
def test_subprocess_errors_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    run_here(monkeypatch)

    def compile_step(*_: Any) -> CompiledStep:
        raise error

    monkeypatch.setattr(compile_module, "compile_step", compile_step)
    with pytest.raises(UserError, match=message):
        compile_in_subprocess(tiny(tmp_path), TARGET)


def test_compiler_crash_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    crash = f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})"

    def crashing(command: list[str], **options: Any) -> Any:
        return run([sys.executable, "-c", crash], **options)

    monkeypatch.setattr(subprocess, "run", crashing)
    with pytest.raises(UserError) as found:
        compile_in_subprocess(tiny(tmp_path), TARGET)
    message = str(found.value)
    assert message.startswith("target v5e:1x1: its compiler, libtpu ")
    assert f"with jax {jax.__version__}, died of SIGSEGV; " in message
    assert "\n" not in message


def test_subprocess_may_load_libtpu_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs: dict[str, str] = {}

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        kwargs.update(env)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        compile_in_subprocess(tiny(tmp_path), TARGET)
    assert kwargs["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    assert kwargs.items() >= os.environ.items() - {("PYTHONPATH", os.environ.get("PYTHONPATH"))}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("v6e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("v5e:2x4", {}),
        ("v4:2x2x1", {"chip_config_name": "megacore"}),
    ],
)
def test_single_chip_topologies(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any]
) -> None:
    """libtpu assumes four chips per host and refuses a slice of one, unless it is configured."""
    asked = {}

    def describe(topology: str, platform: str, **arguments: Any) -> Any:
        asked[topology, platform] = arguments
        return type("Topology", (), {"devices": []})

    monkeypatch.setattr("train.estimate.target.require_compiler", lambda target: None)
    monkeypatch.setattr("train.estimate.target.topologies.get_topology_desc", describe)
    target_devices(parse_target(name))
    assert asked == {(name, "tpu"): settings}
