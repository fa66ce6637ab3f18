"""Build the notebooks of `colab/` from their sources, Python files in jupytext's percent format.

    python -m tests.colab.build --write

A title after `# %%` is the cell's id, so that tests can name cells. The markdown cell `setup`
stands for the cells of `sources/_setup.py`, which all notebooks share. Without --write the
command lists the notebooks that differ from their sources, and exits with status 1 if any do.
"""

import argparse
import pathlib
import sys
from typing import Any

import jupytext
import nbformat

FOLDER = pathlib.Path(__file__).parents[2] / "colab"
SETUP = FOLDER / "sources" / "_setup.py"


def sources() -> list[pathlib.Path]:
    """Return the source of every notebook."""
    return [path for path in sorted((FOLDER / "sources").glob("*.py")) if path != SETUP]


def notebook_path(source: pathlib.Path) -> pathlib.Path:
    """Return the path of a source's notebook."""
    return FOLDER / f"{source.stem}.ipynb"


def build(source: pathlib.Path) -> str:
    """Return the notebook of a source as its file's text."""
    cells = []
    for cell in read_cells(source):
        cells += read_cells(SETUP) if cell.id == "setup" else [cell]
    for cell in cells:
        if cell.cell_type == "markdown":
            cell.source = cell.source.replace("NOTEBOOK", source.stem)
    notebook = nbformat.v4.new_notebook(
        cells=cells,
        metadata={
            "colab": {"provenance": [], "toc_visible": True},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
    )
    nbformat.validate(notebook)
    text: str = nbformat.writes(notebook)
    return text + "\n"


def read_cells(source: pathlib.Path) -> list[Any]:
    """Return the cells of a source, with their titles as ids."""
    cells = jupytext.read(source, fmt="py:percent").cells
    for number, cell in enumerate(cells):
        cell.id = cell.metadata.get("title", f"{source.stem.strip('_')}-{number}")
        cell.metadata = {"tags": cell.metadata.tags} if "tags" in cell.metadata else {}
    return list(cells)


def main(arguments: list[str] | None = None) -> int:
    """Write the notebooks, or list those that are out of date."""
    parser = argparse.ArgumentParser(prog="python -m tests.colab.build")
    parser.add_argument("--write", action="store_true", help="write them; without it only compare")
    write = parser.parse_args(arguments).write
    stale = []
    for source in sources():
        path, text = notebook_path(source), build(source)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if write:
                path.write_text(text, encoding="utf-8")
    print("written:" if write else "out of date:", ", ".join(stale) or "none")
    return int(bool(stale) and not write)


if __name__ == "__main__":
    sys.exit(main())
