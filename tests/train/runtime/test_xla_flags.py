import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.runtime.xla_flags import (
    GPU_FLAGS,
    TPU_FLAGS,
    guess_platform,
    requested_determinism,
    set_overlap_flags,
)


def test_each_platform_has_its_own_variable() -> None:
    environment: dict[str, str] = {}
    set_overlap_flags("tpu", environment)
    assert set(environment) == {"LIBTPU_INIT_ARGS"}
    assert len(environment["LIBTPU_INIT_ARGS"].split()) == len(TPU_FLAGS)
    set_overlap_flags("gpu", environment)
    flags = environment["XLA_FLAGS"]
    assert flags.split() == [f"--{name}={GPU_FLAGS[name]}" for name in GPU_FLAGS]
    set_overlap_flags("cpu", environment)
    assert environment["XLA_FLAGS"] == flags


def test_user_flags_are_kept() -> None:
    mine = "--xla_gpu_enable_latency_hiding_scheduler=false --mine"
    environment = {"XLA_FLAGS": mine}
    for _ in range(2):  # applying it twice changes nothing
        set_overlap_flags("gpu", environment)
    flags = environment["XLA_FLAGS"].split()
    assert " ".join(flags[:2]) == mine
    assert len(flags) == 2 + len(GPU_FLAGS) - 1
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" not in flags


@pytest.mark.parametrize(
    ("asked", "platform"), [("cpu", "cpu"), ("cuda,cpu", "gpu"), ("tpu", "tpu")]
)
def test_platform_from_environment(asked: str, platform: str) -> None:
    assert guess_platform({"JAX_PLATFORMS": asked}) == platform


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("", ""),
        ("--xla_gpu_enable_latency_hiding_scheduler=true", ""),
        ("--xla_gpu_deterministic_ops=false", ""),
        ("--a=1 --xla_gpu_deterministic_ops", "--xla_gpu_deterministic_ops"),
        (
            "--xla_gpu_deterministic_ops=false --xla_gpu_deterministic_ops=true",
            "--xla_gpu_deterministic_ops",
        ),
        ("--xla_gpu_exclude_nondeterministic_ops=true", "--xla_gpu_exclude_nondeterministic_ops"),
    ],
)
def test_requested_determinism(flags: str, found: str) -> None:
    assert requested_determinism({"XLA_FLAGS": flags}) == found


def test_xla_accepts_the_flags() -> None:
    """XLA aborts the process for an unknown flag."""
    flags: dict[str, str] = {"JAX_PLATFORMS": "cpu"}
    set_overlap_flags("gpu", flags)
    program = "import os; os.environ.update({}); import jax; print(jax.devices())"
    result = subprocess.run(
        [sys.executable, "-c", program.replace("{}", repr(flags))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


ENVIRONMENT = """
import os, sys
before = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))}
from train.config.experiment_files import find_experiment
from train.fitting import fit
from train.parallel.distributed import initialize_distributed

initialize_distributed()
import jax
from train.runtime.local_hardware import enable_compilation_cache, local_hardware

enable_compilation_cache()
local_hardware()
assert jax.local_device_count() == 3, jax.devices()
assert jax.config.jax_compilation_cache_dir == sys.argv[1], jax.config.jax_compilation_cache_dir
assert jax.config.jax_debug_nans
assert jax.config.jax_default_matmul_precision == "float32"
after = {name: os.environ.get(name) for name in before}
assert after == before, (before, after)
"""


def test_variables_of_the_user_are_respected(tmp_path: Path) -> None:
    """The devices of XLA_FLAGS are used, and no JAX_ variable is overridden."""
    cache = str(tmp_path / "own cache")
    kwargs = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_DEBUG_NANS": "1",
        "JAX_DEFAULT_MATMUL_PRECISION": "float32",
    }
    command = [sys.executable, "-c", ENVIRONMENT, cache]
    done = subprocess.run(
        command, env={**os.environ, **kwargs}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
