"""What can be measured, shown and tried here, each with its question and its time.

Each package of `bench/` lists its own in ENTRIES. `python -m bench` prints them, `python -m bench
NAME` runs one, and `python -m bench readme` writes them to bench/README.md.
"""

from importlib import import_module
from typing import NamedTuple

PACKAGES = {
    "race": "Races against other implementations, and profiles of our own programs",
    "claims": "Small experiments behind the claims of the textbooks, and their figures",
    "studies": "Studies: many runs with several seeds, which go on where they stopped",
    "drills": "Drills: faults on purpose, and comparisons with other libraries case by case",
}


class Entry(NamedTuple):
    """Something to run.

    name: of the command, unique among all entries.
    question: that it answers, as a sentence.
    minutes: on two cores of a shared machine, at the settings whose figures are published; 0 for
        less than one.
    run: `module:function` below `bench`; the function's parameters are its settings on the command
        line, and it returns the exit status, or None for 0.
    needs: what it needs besides this project: data, another Python with torch.
    """

    name: str
    question: str
    minutes: float
    run: str
    needs: str = ""


def entries() -> dict[str, list[Entry]]:
    """Return the entries of each package."""
    return {name: list(import_module(f"bench.{name}").ENTRIES) for name in PACKAGES}
