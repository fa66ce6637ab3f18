"""Formats of numbers, and the tables that `describe` and `plan` share."""

from rich import box
from rich.table import Table

from train.estimate.compile import CompiledStep
from train.estimate.memory import Memory


def new_table(title: str, first: str, *columns: str) -> Table:
    """Return an empty table; all columns but the first are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def format_count(number: float) -> str:
    """Format a count with a decimal prefix, for example `12.3 M`."""
    return _scaled(number, 1000, ("", " k", " M", " G", " T", " P"))


def format_bytes(size: float) -> str:
    """Format a size, possibly negative, for example `12.3 MiB`."""
    sign = "-" if size < 0 else ""
    return sign + _scaled(abs(size), 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    """Format with three significant digits and the largest prefix that leaves 1 or more."""
    power = 0
    # By the rounded number: 999.7 is 1 k, and not 1000.
    while round(number) >= base and power < len(units) - 1:
        number /= base
        power += 1
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return digits + units[power]


def memory_table(title: str, size: Memory, compiled: CompiledStep | None) -> Table:
    """Return the estimated memory of one chip, beside the compiler's if there is one."""
    estimated = {
        "weights": size.weights,
        "optimizer": size.optimizer,
        "other state": size.other_state,
        "batch": size.batch,
        "gradients": size.gradients,
        "residuals": size.residuals,
        "working set of a layer or the loss": size.working_set,
        "temporaries": size.temporaries,
        # Nearly all outputs take the memory of donated arguments.
        "outputs and program": 0,
        "all": size.total,
    }
    actual: dict[str, int] = {}
    table = new_table(title, "what", "estimated")
    if compiled is not None:
        table.add_column("compiled", justify="right")
        actual = {
            "weights": compiled.weights,
            "optimizer": compiled.optimizer,
            "other state": compiled.other_state,
            "batch": compiled.batch,
            "temporaries": compiled.temporaries,
            "outputs and program": compiled.peak - compiled.arguments - compiled.temporaries,
            "all": compiled.peak,
        }
    for name, estimate in estimated.items():
        if estimate or name in actual:
            style = "bold" if name in ("all", "temporaries") else None
            shown = (format_bytes(actual[name]),) if name in actual else ()
            table.add_row(name, format_bytes(estimate), *shown, style=style)
    return table
