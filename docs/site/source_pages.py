"""Pages that show a file, a folder or a notebook of the repository that other pages link to."""

import posixpath

import jupytext

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
    """Return a notebook as a page: its prose and its code, without outputs."""
    stem = posixpath.basename(path).removesuffix(".ipynb")
    source = ROOT / "colab" / "sources" / f"{stem}.py"
    parts = []
    for cell in jupytext.read(source, fmt="py:percent").cells:
        if cell.metadata.get("title") == "setup":
            parts.append(f"The notebook `colab/{stem}.ipynb` installs the project here.")
        elif cell.cell_type == "markdown":
            lines = [line for line in cell.source.splitlines() if "colab-badge" not in line]
            parts.append("\n".join(lines))
        else:
            parts.append(f"```python\n{cell.source}\n```")
    return "\n\n".join(parts) + "\n"
