"""Pages that show a file, a folder or a notebook of the repository that other pages link to."""

import json
import posixpath
from typing import Any

from docs.site.links import ROOT

_ORPHAN = "---\norphan: true\nno-search: true\n---\n\n"
_LANGUAGES = {"py": "python", "sh": "bash", "sbatch": "bash", "yaml": "yaml", "toml": "toml"}


def source_page(path: str) -> str:
    """Return a page that shows a file, or lists a folder."""
    if (ROOT / path).is_dir():
        files = sorted(each.name for each in (ROOT / path).iterdir() if each.is_file())
        lines = [f"- `{name}`" for name in files if not name.startswith((".", "__"))]
        return "\n".join([_ORPHAN + f"# {path}", "", "Files of this folder:", "", *lines])
    language = _LANGUAGES.get(path.rsplit(".", 1)[-1], "text")
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    return f"{_ORPHAN}# {path}\n\n````{language}\n{text}\n````\n"


def notebook_page(path: str) -> str:
    """Return a notebook as a page: its prose, its code and its outputs, without its installation.

    The page has the pictures in itself, so that no files go with it.
    """
    name = posixpath.basename(path)
    setup = (ROOT / "colab" / "sources" / "_setup.py").read_text("utf-8")
    parts = []
    for cell in json.loads((ROOT / path).read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if f"# %% {cell['id']}\n" in setup or f"# %% {cell['id']} [markdown]\n" in setup:
            if cell["id"] == "install":
                parts.append(f"The notebook, `{name}`, installs the project here.")
        elif cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        text = "".join(output["text"]).rstrip()
        return f"````{{code-block}} text\n:class: output\n\n{text}\n````"
    picture = "".join(output["data"]["image/png"]).strip()
    return f"![Output](data:image/png;base64,{picture})"
