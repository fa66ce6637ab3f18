"""Build the notebooks of `colab/` from their sources, Python files in jupytext's percent format.

    python -m tests.colab.build                 # list the notebooks that differ from their sources
    python -m tests.colab.build --write         # write them
    python -m tests.colab.build --run [NAME..]  # write them, execute them, and keep their outputs

A title after `# %%` is the cell's id, so that tests can name cells. The markdown cell `setup`
stands for the cells of `sources/_setup.py`, which all notebooks share. Outputs stay until the code
of their cell changes. The first form exits with status 1 if a notebook differs.

Badges, in the notebooks and in docs/colab.md, and the git address in the setup cell are made from
`[project.urls] Repository` of pyproject.toml, and are left out until it is there.
"""

import argparse
import base64
import io
import pathlib
import re
import sys
import tempfile
from typing import Any

import jupytext
import nbformat
import PIL.Image

from bench.drills.notebooks import execute
from docs.site.repository import colab_badge, repository

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "colab"
SETUP = FOLDER / "sources" / "_setup.py"
LIST = ROOT / "docs" / "colab.md"
MARKER = "<!-- badges: python -m tests.colab.build --write -->\n"

# The accelerator that Colab offers when it opens a notebook. The programs that some notebooks start
# share a GPU with them, and would be left the CPU beside a TPU.
ON_GPU = ("fine_tune_lora", "scaling_laws", "survive_failures")
GPU: dict[str, Any] = {"accelerator": "GPU", "colab": {"gpuType": "T4"}}
TPU: dict[str, Any] = {"accelerator": "TPU", "colab": {"gpuType": "V5E1"}}

OUTPUTS_NOTE = "*The outputs below are those of a small run on a CPU, with the settings shown.*"


def sources() -> list[pathlib.Path]:
    """Return the source of every notebook."""
    return [path for path in sorted((FOLDER / "sources").glob("*.py")) if path != SETUP]


def notebook_path(source: pathlib.Path) -> pathlib.Path:
    """Return the path of a source's notebook."""
    return FOLDER / f"{source.stem}.ipynb"


def build(source: pathlib.Path) -> Any:
    """Return the notebook of a source, without outputs."""
    cells = []
    for cell in read_cells(source):
        cells += read_cells(SETUP) if cell.id == "setup" else [cell]
    title, _, rest = cells[0].source.partition("\n\n")
    badge = colab_badge(f"colab/{source.stem}.ipynb")
    cells[0].source = "\n\n".join([title, *([badge] if badge else []), rest, OUTPUTS_NOTE])
    if address := repository():
        install = next(cell for cell in cells if cell.id == "install")
        install.source = install.source.replace('REPOSITORY = ""', f'REPOSITORY = "git+{address}"')
    hardware = GPU if source.stem in ON_GPU else TPU
    notebook = nbformat.v4.new_notebook(
        cells=cells,
        metadata={
            **hardware,
            "colab": {**hardware["colab"], "provenance": [], "toc_visible": True},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
    )
    nbformat.validate(notebook)
    return notebook


def read_cells(source: pathlib.Path) -> list[Any]:
    """Return the cells of a source, with their titles as ids."""
    cells = jupytext.read(source, fmt="py:percent").cells
    for number, cell in enumerate(cells):
        cell.id = cell.metadata.get("title", f"{source.stem.strip('_')}-{number}")
        cell.metadata = {"tags": cell.metadata.tags} if "tags" in cell.metadata else {}
    return list(cells)


def without_outputs(path: pathlib.Path) -> Any:
    """Return a notebook's file as `build` returns it."""
    notebook: Any = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def take_outputs(notebook: Any, executed: Any) -> None:
    """Give the cells of a notebook the outputs of the same code in an executed one."""
    outputs = {(cell.id, cell.source): cell for cell in executed.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        if same := outputs.get((cell.id, cell.get("source"))):
            cell.outputs, cell.execution_count = same.outputs, same.execution_count


def clean_outputs(notebook: Any) -> None:
    """Leave what a reader looks for: printed text and pictures, without the names of folders."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        kept: list[Any] = []
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                picture = {"image/png": small_png(data["image/png"])}
                kept.append(nbformat.v4.new_output("display_data", picture))
            elif output.get("name") != "stderr":
                text = plain(output.get("text") or data.get("text/plain", ""))
                if "text/html" in data and text.startswith("<"):
                    text = "(an interactive view: run the cell to see it)\n"
                if kept and "text" in kept[-1]:
                    kept[-1].text += text
                elif text:
                    kept.append(nbformat.v4.new_output("stream", name="stdout", text=text))
        cell.outputs = kept


def plain(text: str) -> str:
    """Return printed text without colors, progress, the ends of long lines, and local folders."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    text = re.sub(r"^.*\r(?!\n)|[ \r]+$", "", text, flags=re.MULTILINE)
    progress = r"^(?!.*  loss ).*  (\S+ elapsed\b.*|done in [\d:]+)\n"
    text = re.sub(progress, "", text, flags=re.MULTILINE)
    text = re.sub(r"^(.{160}).{2,}$", r"\1…", text, flags=re.MULTILINE)
    text = text.replace(f"{ROOT}/", "").replace(str(pathlib.Path.home()), "~")
    temporary = rf"{re.escape(tempfile.gettempdir())}/[\w-]+"
    return re.sub(temporary, ".", re.sub(f"{temporary}/", "", text))


def small_png(data: str) -> str:
    """Return a picture, in base64, with 256 colors, or with 16 if that takes more than 60 kB."""
    picture = PIL.Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    small = b""
    for colors in (256, 16):
        file = io.BytesIO()
        picture.quantize(colors, dither=PIL.Image.Dither.NONE).save(file, "png", optimize=True)
        small = file.getvalue()
        if len(small) < 60_000:
            break
    return base64.b64encode(small).decode()


def listed(text: str) -> str:
    """Return docs/colab.md with the badges of the table after the marker."""
    start, marker, rest = text.partition(MARKER)
    table, gap, rest = rest.partition("\n\n")
    table = re.sub(r" \[!\[Open in Colab\].*?\)\]\(.*?\)", "", table)
    table = re.sub(
        r"\(\.\./(colab/\w+\.ipynb)\)",
        lambda match: f"{match[0]} {colab_badge(match[1]) or ''}".rstrip(),
        table,
    )
    return start + marker + table + gap + rest


def main(arguments: list[str] | None = None) -> int:
    """Write the notebooks, or list those that are out of date."""
    parser = argparse.ArgumentParser(prog="python -m tests.colab.build")
    parser.add_argument("--write", action="store_true", help="write them; without it only compare")
    names = [source.stem for source in sources()]
    parser.add_argument(
        "--run", nargs="*", choices=names, metavar="NAME", help="run all, or these; keep outputs"
    )
    given = parser.parse_args(arguments)
    runs = given.run is not None
    stale = []
    for source in sources():
        path, notebook = notebook_path(source), build(source)
        if given.run and source.stem not in given.run:
            continue
        if not runs and path.exists() and without_outputs(path) == notebook:
            continue
        stale.append(path.name)
        if path.exists():
            take_outputs(notebook, nbformat.read(path, as_version=4))
        if given.write or runs:
            nbformat.write(notebook, path)
        if runs:
            with tempfile.TemporaryDirectory() as folder:
                take_outputs(notebook, execute(path, pathlib.Path(folder)))
            clean_outputs(notebook)
            nbformat.write(notebook, path)
    text = LIST.read_text("utf-8")
    if listed(text) != text:
        stale.append(LIST.name)
        if given.write or runs:
            LIST.write_text(listed(text), "utf-8")
    print("written:" if given.write or runs else "out of date:", ", ".join(stale) or "none")
    return int(bool(stale) and not given.write and not runs)


if __name__ == "__main__":
    sys.exit(main())
