"""Report the hardware and versions of this machine, and what is wrong with them."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from train.doctor import accelerator, environment, trial, versions
from train.doctor.environment import Finding, Level, Machine, inspect_machine

if TYPE_CHECKING:
    from rich.console import Console


LEVEL_MARKS: dict[Level, str] = {
    "ok": "[green]ok[/green]",
    "warning": "[yellow]warning[/yellow]",
    "problem": "[red]problem[/red]",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """All that was found."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if there is no problem; warnings are none."""
        return not self.count("problem")

    def count(self, level: Level) -> int:
        """Return the number of findings of a level."""
        return sum(finding.level == level for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"ok": self.ok, "findings": [dataclasses.asdict(each) for each in self.findings]}

    def print(self, console: "Console | None" = None) -> None:
        """A table for people, on standard output unless a console is given."""
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
    """Looks at this machine, in a few seconds; computes a little on its first device."""
    machine = inspect_machine()
    return Report(
        (
            *versions.check_versions(),
            *_devices(machine),
            *environment.check_environment(machine),
        )
    )


def accelerator_warnings(platform: str) -> list[str]:
    """Return a line for each thing that is wrong with the accelerator that JAX uses, or does not.

    Asks JAX nothing but why a platform did not start, so `fit` can say it before it trains.
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
    yield trial.check_bfloat16()
    yield trial.check_speed(platform)
    yield _compilation_cache()


def _compilation_cache() -> Finding:
    """Check where `fit` keeps compiled programs, and that it can be imported."""
    import jax

    try:
        from train.runtime.hardware import enable_compilation_cache
    except ImportError as error:
        remedy = "pip install -e . in the project's folder"
        return Finding("transformer", "problem", f"cannot be imported: {error}", remedy)
    enable_compilation_cache()
    return environment.check_compilation_cache(jax.config.values["jax_compilation_cache_dir"])
