"""Execute every notebook of `colab/` from top to bottom, as a person would.

    python -m bench notebooks [--only own_attention]

A notebook fails if a cell raises or prints a warning to standard error. Prints the
seconds and the number of pictures of each; the exit status is the number of notebooks that failed.
"""

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


def execute(
    path: Path,
    folder: Path,
    *,
    parameters: str = "",
    environment: Mapping[str, str] | None = None,
    timeout: int = 1200,
) -> Any:
    """Execute a notebook in a folder; return it with its outputs.

    Args:
      path: The notebook.
      folder: Working folder of the cells.
      parameters: Code to run after the cell tagged `parameters`, as papermill does.
      environment: Variables besides those of this process.
      timeout: Limit of a cell, in seconds.

    Raises:
      CellExecutionError: a cell raised.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    if parameters:
        tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
        cell = new_code_cell(parameters, id="injected")
        notebook.cells.insert(tags.index(["parameters"]) + 1, cell)
    variables = {
        **os.environ,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(folder / "ipython"),
        **(environment or {}),
    }
    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=timeout, resources=resources).execute(env=variables)


def warnings(notebook: Any) -> list[str]:
    """Return what the cells of an executed notebook wrote to standard error."""
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    return [each.text for each in outputs if each.get("name") == "stderr"]


def count_pictures(notebook: Any) -> int:
    """Return the number of pictures that an executed notebook shows."""
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    return sum("image/png" in each.get("data", {}) for each in outputs)


def drill(only: str = "") -> int:
    """Execute all notebooks, or one; return the number of those that failed.

    Args:
      only: Name of a notebook without its suffix. Empty: all.
    """
    failed = 0
    for path in NOTEBOOKS:
        if only not in ("", path.stem):
            continue
        start, problem, pictures = time.monotonic(), "", 0
        with tempfile.TemporaryDirectory() as folder:
            try:
                notebook = execute(path, Path(folder))
                problem, pictures = "".join(warnings(notebook)), count_pictures(notebook)
            except CellExecutionError as error:
                problem = str(error)
        seconds, status = time.monotonic() - start, "failed" if problem else "ok"
        print(f"{path.stem:24} {seconds:4.0f} s  {pictures} pictures  {status}", flush=True)
        print(problem[-2000:], end="", file=sys.stderr)
        failed += bool(problem)
    return failed
