"""Run all checks of this machine and report the findings."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from train.doctor import accelerator, environment, versions
from train.doctor.environment import Finding, Level, Machine, inspect_machine

if TYPE_CHECKING:
    from rich.console import Console


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

    def print(self, console: "Console | None" = None) -> None:
        """Print a table to a console, by default standard output."""
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = console or Console(highlight=False)
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("", "what", "found"):
            table.add_column(column)
        for each in self.findings:
            remedy = f"\n-> {each.remedy}" if each.remedy else ""
            table.add_row(LEVEL_MARKS[each.level], each.name, escape(each.detail + remedy))
        console.print(table)
        console.print(f"Problems: {self.count('problem')}. Warnings: {self.count('warning')}.")


def run_checks() -> Report:
    """Check this machine's versions, devices and environment; takes a few seconds."""
    machine = inspect_machine()
    return Report(
        (
            *versions.check_versions(),
            *_devices(machine),
            *environment.check_environment(machine),
        )
    )


def accelerator_warnings(platform: str) -> list[str]:
    """Return one line per problem with the accelerator that JAX uses, or does not use.

    Cheap enough to call before training: JAX is asked only why a platform did not start.
    """
    findings = [
        accelerator.check_accelerator(platform, inspect_machine(), versions.installed_plugins())
    ]
    if platform != "cpu":
        findings += versions.check_plugins()
    return [f"{each.name}: {each.detail}; {each.remedy}" for each in findings if each.level != "ok"]


def _devices(machine: Machine) -> Iterator[Finding]:
    devices = accelerator.start_backend(machine.environment)
    if isinstance(devices, Finding):
        yield devices
        return
    platform = devices[0].platform
    yield accelerator.report_devices(devices)
    yield accelerator.check_accelerator(platform, machine, versions.installed_plugins())
    yield accelerator.check_bfloat16()
    yield accelerator.check_speed(platform)
    yield _compilation_cache()


def _compilation_cache() -> Finding:
    """Check that the compilation cache of `fit` can be imported and its folder written to."""
    import jax

    try:
        from train.runtime.local_hardware import enable_compilation_cache
    except ImportError as error:
        remedy = "pip install -e . in the project's folder"
        return Finding("transformer", "problem", f"cannot be imported: {error}", remedy)
    enable_compilation_cache()
    return environment.check_compilation_cache(jax.config.values["jax_compilation_cache_dir"])
