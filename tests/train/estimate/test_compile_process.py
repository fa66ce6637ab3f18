"""A compiler that crashes ends a plan with one line; results and errors are returned unchanged."""

import dataclasses
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.train.support import tiny
from train.errors import UserError
from train.estimate import compile as compile_module
from train.estimate.chips import CHIPS
from train.estimate.compile import CompiledStep, compile_in_subprocess
from train.estimate.target import Target, parse_target, target_devices
from train.parallel.mesh import MeshConfig

STEP = CompiledStep(1, 2, 3, 4, 5, 6, 7, 8, 0.5)
TARGET = Target("v5e:1x1", CHIPS["v5e"], (1, 1))


def test_step_and_errors_come_from_the_other_process(tmp_path: Path) -> None:
    """The step of this machine, which needs no other compiler."""
    sized = tiny(tmp_path, num_layers=1)
    sized = dataclasses.replace(sized, model=dataclasses.replace(sized.model, vocab_size=24))
    cpu = dataclasses.replace(CHIPS["t4"], platform="cpu")
    here = Target("here", cpu, (1,), is_local=True)
    step = compile_in_subprocess(sized, here)
    assert step.peak >= step.arguments > step.weights > 0
    assert step.program is None
    odd = dataclasses.replace(sized, mesh=MeshConfig(data=1, tensor=3))
    with pytest.raises(UserError, match=r"^mesh"):
        compile_in_subprocess(odd, here)


def test_unimportable_class_is_compiled_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of a mixer in a user's config file."""
    module = types.ModuleType("experiment_own")
    unknown = type("Unknown", (), {"__module__": module.__name__, "__qualname__": "Unknown"})
    vars(module)["Unknown"] = unknown
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compile_module, "compile_step", lambda *arguments: STEP)
    experiment: Any = unknown()
    assert compile_in_subprocess(experiment, TARGET) is STEP


class Crash:
    """What ends the process that reads it, as a compiler may."""

    def __reduce__(self) -> Any:
        return os.kill, (_Process(), signal.SIGSEGV)


class _Process:
    """The number of the process that reads it."""

    def __reduce__(self) -> Any:
        return os.getpid, ()


def test_compiler_crash_is_one_line() -> None:
    crash: Any = Crash()
    with pytest.raises(UserError) as found:
        compile_in_subprocess(crash, TARGET)
    message = str(found.value)
    assert message.startswith("target v5e:1x1: its compiler, libtpu ")
    assert f"with jax {jax.__version__}, failed (" in message
    assert "\n" not in message


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
