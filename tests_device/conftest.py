"""Device test suite: checks of the library and the trainer on this machine's accelerator.

    make test-device
    TEST_DEVICE=cpu make test-device    # the same checks, on two CPU devices

`tests/` runs small programs on the CPU, so it cannot detect that a kernel, a driver or a compiler
of an accelerator computes something else. This suite can: attention backends against float64,
training in bfloat16 and float16, rematerialization, donation, bit-exact resume, two devices
against one, and a short quickstart. It takes minutes. Without an accelerator all tests are skipped
and the exit status is 0.

At the end a table is printed. To report a machine, paste the whole table into an issue, with the
name of the machine (Colab T4, Kaggle TPU v5e-8, ...), whether all checks passed or not. For a
failed check, add pytest's output above the table.
"""

import dataclasses
import os
import platform
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import pytest

from tests_device.support import Meter
from train.runtime.local_hardware import local_hardware
from transformer import Hardware

NO_ACCELERATOR = (
    "test-device: no accelerator here (JAX sees: cpu); skipped. "
    "Set TEST_DEVICE=cpu to run the same checks on the CPU"
)


@dataclasses.dataclass
class Row:
    """One line of the table."""

    name: str
    outcome: str = "passed"
    seconds: float = 0.0
    detail: str = ""
    measured: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Errors with their tolerances."""


SESSION: dict[str, Any] = {"began": time.monotonic(), "rows": {}}
"""State of this pytest process: hardware, start time and the table's rows by node id."""


def pytest_configure(config: pytest.Config) -> None:
    """Start the backend and keep everything that is cached in a temporary folder."""
    asked = os.environ.get("TEST_DEVICE", "")
    if asked not in ("", "cpu"):
        raise pytest.UsageError(f"TEST_DEVICE={asked}: give cpu, or leave it unset")
    folder = tempfile.TemporaryDirectory(prefix="test-device-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ["TRANSFORMER_CACHE"] = f"{folder.name}/data"
    # Runs of the same program (a resume, its comparison) share a compilation cache.
    jax.config.update("jax_compilation_cache_dir", f"{folder.name}/compiled")
    if asked == "cpu":
        # Before the backend starts; this also hides a GPU.
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
    SESSION["hardware"] = local_hardware()
    SESSION["skip"] = SESSION["hardware"].platform == "cpu" and asked != "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all tests without an accelerator, unless TEST_DEVICE requests the CPU."""
    for item in items if SESSION["skip"] else ():
        item.add_marker(pytest.mark.skip(reason="no accelerator here"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the outcome of one phase of a test to its row of the table."""
    report = yield
    row = SESSION["rows"].setdefault(item.nodeid, Row(_name(item.name)))
    row.seconds += report.duration
    if report.outcome != "passed":
        row.outcome = report.outcome
        row.detail = _reason(report, call)
    if call.when == "call" and isinstance(meter := item.stash.get(METER, None), Meter):
        row.measured = meter.measured
        row.detail = row.detail or meter.note
    return report


def _name(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def _reason(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    """Return the first line of what a test raised, or the reason why it was skipped."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    if call.excinfo is None:
        return ""
    lines = str(call.excinfo.value).strip().splitlines() or [""]
    # An assertion's message is clear by itself.
    kind = "" if call.excinfo.errisinstance(AssertionError) else f"{call.excinfo.typename}: "
    return f"{kind}{lines[0]}"[:160]


METER = pytest.StashKey[Meter]()


@pytest.fixture
def meter(request: pytest.FixtureRequest) -> Meter:
    """Recorder of errors and tolerances for the table."""
    return request.node.stash.setdefault(METER, Meter())


@pytest.fixture(scope="session")
def hardware() -> Hardware:
    """Hardware of all devices of this machine."""
    actual: Hardware = SESSION["hardware"]
    return actual


@pytest.fixture(scope="session")
def one_device(hardware: Hardware) -> Hardware:
    """Hardware of the first device only."""
    return dataclasses.replace(hardware, count=1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table, or one line that explains why there is none."""
    if SESSION["skip"]:
        terminalreporter.write_line(NO_ACCELERATOR, yellow=True, bold=True)
        return
    if SESSION["rows"]:
        terminalreporter.section("test-device: paste from here")
        for line in _table():
            terminalreporter.write_line(line)
        terminalreporter.section("test-device: to here")


def _table() -> list[str]:
    rows = _merged(list(SESSION["rows"].values()))
    cells = [("check", "result", "error / tolerance", "seconds")]
    cells += [(row.name, row.outcome, _error(row), f"{row.seconds:.1f}") for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [*_machine(), ""]
    for cell, detail in zip(cells, ["", *(row.detail for row in rows)], strict=True):
        name, result, error, seconds = (t.ljust(w) for t, w in zip(cell, widths, strict=True))
        lines.append(f"{name}  {result}  {error}  {seconds.strip():>7}  {detail}".rstrip())
    counts = [f"{sum(row.outcome == each for row in rows)} {each}" for each in OUTCOMES]
    total = time.monotonic() - SESSION["began"]
    return [*lines, "", f"{', '.join(counts)} in {total:.0f} s"]


OUTCOMES = ("passed", "failed", "skipped")


def _merged(rows: list[Row]) -> list[Row]:
    """Return the rows, with cases of one test that were skipped for the same reason joined."""
    skipped: dict[tuple[str, str], list[str]] = {}
    merged = []
    for row in rows:
        test, _, case = row.name.partition("[")
        if row.outcome == "skipped" and case:
            cases = skipped.setdefault((test, row.detail), [])
            cases.append(case.rstrip("]"))
            if len(cases) > 1:
                continue
        merged.append(row)
    for row in merged:
        test = row.name.partition("[")[0]
        cases = skipped.get((test, row.detail), []) if row.outcome == "skipped" else []
        if len(cases) > 1:
            row.name, row.detail = (
                f"{test}[{len(cases)} cases]",
                f"{row.detail}: {', '.join(cases)}",
            )
    return merged


def _error(row: Row) -> str:
    """Return the error that is closest to its tolerance, or furthest beyond it."""
    if not row.measured:
        return ""
    # NaN does not compare: it counts as the largest error.
    error, tolerance = max(row.measured, key=lambda each: (each[0] != each[0], each[0] / each[1]))
    return f"{error:.1e} / {tolerance:.1e}"


def _machine() -> list[str]:
    """Return lines that name the devices and the versions of their drivers."""
    hardware, devices = SESSION["hardware"], jax.devices()
    chip = f"{hardware.kind} ({hardware.platform})"
    if hardware.compute_capability:
        chip += f", compute capability {hardware.compute_capability}"
    client = " ".join(str(devices[0].client.platform_version).split())
    versions = [f"python {platform.python_version()}"]
    versions += [f"{name} {version}" for name, version in _packages()]
    return [
        f"device: {len(devices)} x {chip}",
        f"runtime: {client[:100]}",
        f"versions: {', '.join(versions)}",
    ]


def _packages() -> Iterator[tuple[str, str]]:
    """Yield name and version of jax, flax and the plugins that are installed."""
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    is_plugin: Callable[[str], bool] = lambda n: n.startswith("jax-") and "plugin" in n  # noqa: E731
    plugins = sorted(name for name in installed if name and is_plugin(name))
    for name in ("jax", "jaxlib", "flax", "libtpu", *plugins):
        if name in installed:
            yield name, installed[name]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Temporary folder of the session, for texts and runs."""
    return tmp_path_factory.mktemp("device")
