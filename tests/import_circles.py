"""Circles of imports between the files and between the folders of the packages.

    python -m tests.import_circles

Every import counts: at the top, inside functions, and for type checkers alone. A file at the top
level of a package is a folder of its own. Prints each circle, and exits with 1 if there is one.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("transformer", "train", "configs")


def module_name(file: Path, root: Path) -> str:
    """Return the name that a file is imported by."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(file: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of the packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in names]
        else:
            continue
        yield from (name for name in names if name in modules)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module of the packages imports."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    modules = {module_name(file, root): file for file in files}
    return {name: set(imported_modules(file, modules)) - {name} for name, file in modules.items()}


def between_folders(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph of folders (`train.data`), and of files beside them (`train.step`)."""

    def folder(module: str) -> str:
        return ".".join(module.split(".")[:2])

    folders: dict[str, set[str]] = {}
    for module, imported in graph.items():
        folders.setdefault(folder(module), set()).update(map(folder, imported))
    return {name: imported - {name} for name, imported in folders.items()}


def find_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the names of a circle, the first of them once more at its end; empty without one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return []


def find_circles(root: Path = ROOT) -> list[str]:
    """Return a line for a circle of files, and one for a circle of folders."""
    graph = import_graph(root)
    circles = [find_circle(graph), find_circle(between_folders(graph))]
    return [" -> ".join(circle) for circle in circles if circle]


def main() -> int:
    """Print the circles; return the exit status."""
    circles = find_circles()
    for circle in circles:
        print(f"circle of imports: {circle}")
    return bool(circles)


if __name__ == "__main__":
    sys.exit(main())
