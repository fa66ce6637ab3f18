"""The project's address on GitHub: `[project.urls] Repository` of pyproject.toml, and nowhere else.

Badges, the git address in the notebooks and links of the README are made from it, and are left out
until it is there.
"""

import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def repository() -> str | None:
    """Return `https://github.com/OWNER/NAME`; None until pyproject.toml has it.

    Raises:
      ValueError: the address is not one of a GitHub repository, which Colab could open.
    """
    urls = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"].get("urls", {})
    if "Repository" not in urls:
        return None
    address = str(urls["Repository"]).removesuffix("/").removesuffix(".git")
    start, _, path = address.partition("https://github.com/")
    if start or path.count("/") != 1:
        raise ValueError(
            f"pyproject.toml: project.urls.Repository is {urls['Repository']!r}; "
            "it must be https://github.com/OWNER/NAME"
        )
    return address


def colab_badge(path: str) -> str | None:
    """Return the badge, in Markdown, that opens a notebook on Colab; None without an address.

    Args:
      path: Path of the notebook in the repository.
    """
    address = repository()
    if address is None:
        return None
    host = "https://colab.research.google.com"
    page = address.replace("https://github.com", f"{host}/github")
    return f"[![Open in Colab]({host}/assets/colab-badge.svg)]({page}/blob/main/{path})"
