"""Run one of the benchmarks, experiments, studies and drills; without a name, list them."""

import sys
from importlib import import_module
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tyro.conf import OmitArgPrefixes

from bench import headline
from bench.entries import PACKAGES, Entry, entries
from train.errors import UserError
from train.figures import figure_style
from train.runtime.signals import PREEMPTED_EXIT_STATUS, PreemptedError

README = Path(__file__).with_name("README.md")
INTRODUCTION = """# Benchmarks

What is measured, shown and tried about this project. `python -m bench NAME` runs one, with `--help`
for its settings; `python -m bench` prints this list. Minutes are for two cores of a shared machine.
"""


def readme() -> str:
    """Return bench/README.md: the entries as tables."""
    parts = [INTRODUCTION]
    for package, listed in entries().items():
        rows = [
            f"| `{each.name}` | {each.question} | {_minutes(each)} | {each.needs} |"
            for each in listed
        ]
        head = "| name | question | minutes | needs |\n| --- | --- | --- | --- |"
        parts.append("\n".join([f"## {PACKAGES[package]}\n", head, *rows]) + "\n")
    return "\n".join(parts)


def _minutes(entry: Entry) -> str:
    return f"{entry.minutes:g}" if entry.minutes else "below 1"


def _print_list() -> None:
    console = Console()
    for package, listed in entries().items():
        shown = Table(title=PACKAGES[package], title_justify="left", box=None, pad_edge=False)
        shown.add_column("name", no_wrap=True)
        shown.add_column("question")
        shown.add_column("minutes", justify="right")
        for each in listed:
            shown.add_row(each.name, escape(each.question), _minutes(each))
        console.print(shown, "")


def main(arguments: list[str]) -> int | None:
    """Run the entry that the first argument names, with the others as its settings.

    Returns the exit status. 75: it was stopped, and the same command continues.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        _print_list()
        return 0
    name, *others = arguments
    if name == "readme":
        README.write_text(readme(), "utf-8")
        return 0
    if name == "headline":
        headline.main()
        return 0
    found = [each for listed in entries().values() for each in listed if each.name == name]
    if not found:
        print(f"{name}: is no benchmark; `python -m bench` lists them", file=sys.stderr)
        return 2
    module, function = found[0].run.split(":")
    try:
        run = getattr(import_module(f"bench.{module}"), function)
        with figure_style():
            status: int | None = tyro.cli(
                run, prog=f"python -m bench {name}", args=others, config=(OmitArgPrefixes,)
            )
    except PreemptedError as stop:
        print(stop, file=sys.stderr)
        return PREEMPTED_EXIT_STATUS
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("bench", "train", "transformer"):
            raise
        print(f"{name}: {error.name} is not installed; needs {found[0].needs}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
