"""Saves that are interrupted by a kill or a full disk."""

import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.train.checkpoint.support import assert_same
from train.checkpoint.manager import CheckpointManager
from train.errors import UserError


def test_uncreatable_folder_is_a_one_line_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with (
        CheckpointManager(tmp_path / "file" / "checkpoints") as checkpoints,
        pytest.raises(UserError, match="/1: could not be written"),
    ):
        checkpoints.save(1, {"w": jnp.ones(3)}, {})


PROGRAM = """
import os, resource, signal, sys
import jax, jax.numpy as jnp
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.manifest import ManifestHandler
from train.errors import UserError

folder, mode = sys.argv[1:]
state = {"w": jnp.arange(4e6).reshape(4000, 1000), "b": jnp.arange(5)}
checkpoints = CheckpointManager(folder, asynchronous=mode != "full disk, synchronous")
checkpoints.save(1, state, {"step": 1})
checkpoints.wait()

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def tried(function):
    try:
        function()
    except UserError as error:
        print(error)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""

KILLED = {
    "while it writes": """
checkpoints.save(2, state, {"step": 2})
while not any("tmp" in name and os.listdir(f"{folder}/{name}") for name in os.listdir(folder)):
    pass
die()
""",
    "before it commits": """
os.rename = os.replace = die
checkpoints.save(2, state, {"step": 2})
checkpoints.wait()
""",
    "before its manifest is written": """
ManifestHandler.finalize = die
checkpoints.save(2, state, {"step": 2})
checkpoints.wait()
""",
}

FULL = """
def attempt():
    checkpoints.save(2, state, {"step": 2})
    checkpoints.wait()

limit(100_000)
tried(attempt)
limit(resource.RLIM_INFINITY)
print(checkpoints.steps(), checkpoints.restore(1, state).metadata)
checkpoints.close()
checkpoints = CheckpointManager(folder)
attempt()
print(checkpoints.steps())
checkpoints.close()
"""


def run_program(body: str, folder: pathlib.Path, mode: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + body, str(folder), mode],
        capture_output=True,
        text=True,
    )


@pytest.mark.full
@pytest.mark.parametrize("moment", KILLED)
def test_killed_save_is_not_a_checkpoint(moment: str, tmp_path: pathlib.Path) -> None:
    killed = run_program(KILLED[moment], tmp_path, "")
    assert killed.returncode == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2.orbax-checkpoint-tmp"}
    like = {
        "w": jax.ShapeDtypeStruct((4000, 1000), jnp.float32),
        "b": jax.ShapeDtypeStruct((5,), jnp.int32),
    }
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        state, extra = checkpoints.restore(1, like)
        assert extra == {"step": 1}
        assert_same(state["w"], jnp.arange(4e6).reshape(4000, 1000))
        checkpoints.save(2, state, {})
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["full disk", "full disk, synchronous"])
def test_full_disk_is_a_one_line_error_and_loses_nothing(mode: str, tmp_path: pathlib.Path) -> None:
    done = run_program(FULL, tmp_path, mode)
    assert done.returncode == 0, done.stderr
    error, steps, again = done.stdout.splitlines()
    assert error == (
        f"checkpoint {tmp_path / '2'}: could not be written (File too large); "
        "make room there or check its permissions; the checkpoints before it are whole"
    )
    assert steps == "[1] {'step': 1}"
    assert again == "[2]"
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
