"""Check a machine's hardware and package versions, for the `doctor` verb.

Nothing here needs a JAX that works: a jaxlib that does not belong to it is what is looked for.
"""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from train.runtime.accelerators import (
    Finding,
    Level,
    check_accelerator,
    check_plugins,
    installed_version,
    notebook_service,
    requirements,
)
from train.runtime.host import count_cores, host_memory_bytes

PROJECT = "linen-transformer"

NAMED_PACKAGES = ("jax", "flax")
"""Packages with a row of their own; others have one only if something is wrong."""

GIB = 2**30

MIN_MEMORY_BYTES = 2 * GIB
"""Memory that the smallest runs need."""

MIN_DISK_BYTES = 2 * GIB
"""Disk space of a small run: three copies of weights and moments (two checkpoints, one in writing).
"""

SLOW_SETTINGS = {
    "JAX_DISABLE_JIT": "runs every operation separately, very slowly",
    "JAX_DEBUG_NANS": "reruns every step with a NaN and slows the others",
    "JAX_ENABLE_X64": "computes in float64 where float32 is meant",
}
"""Variables that slow JAX down, with their effect."""

LEVEL_MARKS: dict[Level, str] = {
    "ok": "[green]ok[/green]",
    "warning": "[yellow]warning[/yellow]",
    "problem": "[red]problem[/red]",
}
"""Markup of each level in the printed table."""


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings of a machine."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Return True if there is no problem; warnings do not count."""
        return not self.count("problem")

    def count(self, level: Level) -> int:
        """Return the number of findings of a level."""
        return sum(finding.level == level for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        return {"ok": self.ok, "findings": [dataclasses.asdict(each) for each in self.findings]}

    def print(self, console: Console | None = None) -> None:
        """Print a table to a console, by default standard output."""
        console = console or Console(highlight=False)
        table = Table("", "what", "found", box=box.SIMPLE_HEAD)
        for each in self.findings:
            remedy = f"\n-> {each.remedy}" if each.remedy else ""
            table.add_row(LEVEL_MARKS[each.level], each.name, escape(each.detail + remedy))
        console.print(table)
        console.print(f"Problems: {self.count('problem')}. Warnings: {self.count('warning')}.")


def run_checks() -> Report:
    """Check this machine's versions, devices, memory and disk."""
    checks = (check_versions(), check_plugins(), check_devices(), check_machine())
    return Report(tuple(finding for findings in checks for finding in findings))


def check_versions() -> Iterator[Finding]:
    """Check Python, jaxlib and the project's requirements, from its metadata if it is installed."""
    python, required = "", []
    if installed_version("jax"):
        required += [each for each in requirements("jax") if each.name == "jaxlib"]
    if installed_version(PROJECT) is None:
        detail = "is not installed, so its required versions are unknown"
        yield Finding(PROJECT, "warning", detail, "pip install -e . in the project's folder")
        required += [Requirement(name) for name in NAMED_PACKAGES]
    else:
        python = importlib.metadata.metadata(PROJECT)["Requires-Python"]
        required += requirements(PROJECT)
    yield check_python(platform.python_version(), python)
    findings = [check_package(each, installed_version(each.name)) for each in required]
    named = {"jaxlib", *NAMED_PACKAGES}
    shown = [each for each in findings if each.name in named or each.level != "ok"]
    yield from shown
    if len(shown) < len(findings):
        yield Finding("packages", "ok", f"{len(findings) - len(shown)} others are as required")


def check_python(version: str, specifier: str) -> Finding:
    """Check the Python version against `Requires-Python`, such as >=3.11."""
    if SpecifierSet(specifier).contains(version, prereleases=True):
        return Finding("python", "ok", _in_range(version, specifier))
    detail = f"{version} is not {specifier}"
    return Finding("python", "problem", detail, f"use a Python that is {specifier}")


def check_package(requirement: Requirement, version: str | None) -> Finding:
    """Check a package: missing or too old is a problem, newer than tested a warning."""
    name, specifier = requirement.name, requirement.specifier
    remedy = f'pip install "{name}{specifier}"'
    if version is None:
        return Finding(name, "problem", "is not installed", remedy)
    if specifier.contains(version, prereleases=True):
        return Finding(name, "ok", _in_range(version, str(specifier)))
    # Upper bounds mark what was tested. A newer version may work, so it is only a warning.
    floor = SpecifierSet(",".join(str(each) for each in specifier if each.operator[0] == ">"))
    if floor.contains(version, prereleases=True):
        detail = f"{version} is newer than the tested versions ({specifier})"
        return Finding(name, "warning", detail, f"if something breaks: {remedy}")
    return Finding(name, "problem", f"{version} is not {specifier}", remedy)


def _in_range(version: str, requirement: str) -> str:
    return f"{version} ({requirement})" if requirement else version


def check_devices() -> Iterator[Finding]:
    """Check that JAX has devices, and leaves no accelerator unused."""
    try:
        import jax  # a jaxlib of another version raises RuntimeError here
    except (ImportError, RuntimeError) as error:
        detail = f"jax cannot be imported: {str(error).strip().partition(chr(10))[0]}"
        yield Finding("devices", "problem", detail, "pip install --upgrade jax jaxlib")
        return
    try:
        devices = jax.local_devices()
    except (AssertionError, RuntimeError) as error:  # JAX may give no reason
        reason, asked = str(error).strip().partition("\n")[0], os.environ.get("JAX_PLATFORMS")
        if asked:
            detail = f"none with JAX_PLATFORMS={asked}{reason and ': '}{reason}"
            remedy = "unset JAX_PLATFORMS, or set it to an available platform"
        else:
            detail = f"jax cannot start: {reason}"
            remedy = "end other processes that use the device, or set JAX_PLATFORMS=cpu"
        yield Finding("devices", "problem", detail, remedy)
        return
    first = devices[0]
    kind = "CPU" if first.platform == "cpu" else f"{first.device_kind} ({first.platform})"
    size = (first.memory_stats() or {}).get("bytes_limit", 0)
    memory = f", {size / GIB:.1f} GiB each for JAX" if size else ""
    yield Finding("devices", "ok", f"{len(devices)} × {kind}{memory}")
    yield check_accelerator(first.platform)


def check_machine(root: Path = Path("/")) -> Iterator[Finding]:
    """Check cores, memory, disk space and variables that slow JAX down."""
    service = notebook_service()
    yield Finding("cores", "ok", f"{count_cores(root)}{f', in {service}' if service else ''}")
    memory = host_memory_bytes(root)
    detail = f"{memory / GIB:.1f} GiB" if memory else "unknown"
    is_small = 0 < memory < MIN_MEMORY_BYTES
    remedy = "lower batch_size and model.d_model" if is_small else ""
    yield Finding("memory", "warning" if is_small else "ok", detail, remedy)
    yield check_disk(Path.cwd())
    for name, harm in SLOW_SETTINGS.items():
        value = os.environ.get(name, "")
        if value.lower() not in ("", "0", "false", "no", "off"):
            yield Finding(name, "warning", f"{value}: {harm}", f"unset {name}")


def check_disk(folder: Path) -> Finding:
    """Check that checkpoints can be written to the working directory."""
    if not os.access(folder, os.W_OK):
        remedy = "give --workdir a folder elsewhere"
        return Finding("disk", "warning", f"{folder} is not writable", remedy)
    free = shutil.disk_usage(folder).free
    is_small = free < MIN_DISK_BYTES
    remedy = "free space for checkpoints, or give --workdir a folder elsewhere" if is_small else ""
    detail = f"{free / GIB:.1f} GiB free in {folder}"
    return Finding("disk", "warning" if is_small else "ok", detail, remedy)
