"""How tables and numbers of a description look."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def new_table(title: str, first: str, *columns: str) -> "Table":
    """A table without rows; all columns but the first are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def format_count(number: float) -> str:
    """`12.3 M`: a number of things."""
    return _scaled(number, 1000, ("", " k", " M", " G", " T", " P"))


def format_bytes(size: float) -> str:
    """`12.3 MiB`: a size, which may be negative."""
    sign = "-" if size < 0 else ""
    return sign + _scaled(abs(size), 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    """Three digits, or all that stand before the point, and the unit that suits them."""
    power = 0
    while round(number) >= base and power < len(units) - 1:
        number /= base
        power += 1
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return digits + units[power]
