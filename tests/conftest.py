"""The strict session every test runs in: on the CPU, offline, warnings as errors.

The test process has eight CPU devices, so that a mesh needs no process of its own. The trainer
counts one of them, as a user's machine has, unless a test module sets `COUNTED_DEVICES`: programs
for one device compile faster, and a checkpoint of one device is saved without slicing its arrays.
The environment is what a process started by a test sees: one device.

Most of the time of a test run is compiling programs that run once or twice, so the compiler is
told to hurry: `python -m bench slow_tests` shows where the time goes.
"""

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jaxlib.version

OLDER_EMITTERS = (0, 7), (0, 10)
"""First and last jaxlib that has `--xla_cpu_use_fusion_emitters` (an unknown flag aborts)."""

os.environ.update(
    JAX_PLATFORMS="cpu",
    HF_HUB_OFFLINE="1",
    MPLBACKEND="Agg",
    NO_COLOR="1",
    COLUMNS="100",
)
os.environ.pop("FORCE_COLOR", None)
# Without LLVM's optimizations compiling takes a third less. The emitters of fusions by MLIR take
# half of what is left; the older ones can be asked for up to jaxlib 0.10, and are gone after it.
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if OLDER_EMITTERS[0] <= jaxlib.version.__version_info__[:2] <= OLDER_EMITTERS[1]:
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(_FLAGS)

import hypothesis
import jax
import jaxtyping
import pytest

# Shapes and dtypes in annotations are checked at every call; not in programs that tests start.
os.environ["TRANSFORMER_TYPECHECK"] = "1"
import transformer  # noqa: F401

del os.environ["TRANSFORMER_TYPECHECK"]

from train.runtime import stages
from transformer.models import model as model_module

# A slow machine must not add lines to what a test expects on standard error.
stages.FIRST_LINE_SECONDS = 3600.0

# As everything else here.
model_module.INIT_OPTIMIZATION_LEVEL = 0

DEVICES = 8

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # reads the flags
# For the processes that tests start: read when JAX is imported. The level is a part of it.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
os.environ["XLA_FLAGS"] = " ".join(_FLAGS[1:])

# Cases are the same in every run and on every machine, and no case is timed.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Keep what is cached out of the home folder, and compile the same program once in a run.

    Each worker has a folder of its own, gone when it ends, and in it one for the processes that its
    tests start: JAX writes an entry in place, so one that is killed may leave half of it.
    `TESTS_COMPILATION_CACHE` names a folder that is kept, for one process that runs the same tests
    many times (`bench.drills.mutations`).
    """
    folder = tempfile.TemporaryDirectory(prefix="transformer-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TRANSFORMER_CACHE"] = f"{folder.name}/data"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder.name}/started"
    compiled = os.environ.get("TESTS_COMPILATION_CACHE", f"{folder.name}/compiled")
    jax.config.update("jax_compilation_cache_dir", compiled)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # A million objects of JAX live as long as the process: the default visits them all too often.
    gc.set_threshold(50_000, 20, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--one-case`."""
    parser.addoption(
        "--one-case",
        action="store_true",
        help="of each test that is not marked full, run the first case alone",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as `full` all `nightly` tests, and the cases of a `sampled` one without its texts.

    An id is matched with its opening bracket: "[plain" is at its beginning. With `--one-case`, of
    what is left only the first case of each test is kept.
    """
    unused: dict[str, set[str]] = {}
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.full)
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        name, _, case = item.nodeid.partition("[")
        kept = {text for text in mark.args if text in f"[{case}"}
        unused.setdefault(name, set(mark.args)).difference_update(kept)
        if not kept:
            item.add_marker(pytest.mark.full)
    some_cases_alone = any("::" in argument for argument in config.args)
    for name, texts in unused.items():
        if texts and not some_cases_alone:
            raise pytest.UsageError(f"{name}: no case has {', '.join(sorted(texts))} in its id")
    if config.getoption("--one-case"):
        fast = [item for item in items if not item.get_closest_marker("full")]
        first = {item.nodeid.partition("[")[0]: item for item in reversed(fast)}
        items[:] = first.values()
        items.reverse()


@pytest.fixture(scope="module", autouse=True)
def counted_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the trainer use one device, or `COUNTED_DEVICES` of the module."""
    count = getattr(request.module, "COUNTED_DEVICES", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda *_: count)
        yield


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Let a test give wrong arrays to a public function, which then refuses them itself."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def count_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the trainer use this many devices for the rest of a test."""
    return lambda count: monkeypatch.setattr(jax, "device_count", lambda *_: count)


MAPS = 20_000
"""Memory maps that a process may have after the tests of a file. Linux allows 65,530."""


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Forget compiled programs once they are many: each keeps a few maps for as long as it lives.

    Where no more can be made, LLVM's code dies of a segmentation fault.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MAPS:
        jax.clear_caches()
