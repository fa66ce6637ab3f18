"""The strict session every test runs in: on the CPU, offline, eight devices, warnings as errors.

The environment is what a process started by a test sees: one CPU device, as a user has, and a
compiler in a hurry. The test process itself has eight, so that a mesh needs no process of its own.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.update(
    JAX_PLATFORMS="cpu",
    HF_HUB_OFFLINE="1",
    MPLBACKEND="Agg",
    NO_COLOR="1",
    COLUMNS="100",
)
os.environ.pop("FORCE_COLOR", None)
# Most of the time goes to compiling programs that run once: without LLVM's optimizations it takes
# a third less.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import hypothesis
import jax
import pytest

DEVICES = 8

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # reads the flags, which are not for the processes that tests start
del os.environ["XLA_FLAGS"]
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # theirs: read when JAX is imported

# Cases are the same in every run and on every machine, and no case is timed.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Keep what is cached out of the home folder, and compile the same program once in a run.

    Each worker has a folder of its own, gone when it ends, and in it one for the processes that its
    tests start: JAX writes an entry in place, so one that is killed may leave half of it.
    """
    folder = tempfile.TemporaryDirectory(prefix="transformer-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TRANSFORMER_CACHE"] = f"{folder.name}/data"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder.name}/started"
    jax.config.update("jax_compilation_cache_dir", f"{folder.name}/compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


MAPS = 20_000
"""Of memory, that a process may have after a file's tests. Linux allows 65,530."""


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Forget compiled programs once they are many: each keeps a few maps for as long as it lives.

    Where no more can be made, LLVM's code dies of a segmentation fault.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MAPS:
        jax.clear_caches()
