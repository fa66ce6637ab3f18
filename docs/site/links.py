"""Links of pages: those that lead out of `docs/` lead to pages that show their targets."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

ROOT_PAGES = {
    "README.md": "index.md",
    "RESULTS.md": "measurements.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Pages of the repository's root, and where the site has them."""

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_BADGE = re.compile(r"\[!\[([^\]]*)\]\(https:[^)\s]*\)\]\(")
_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def site_path(source: str) -> str:
    """Return the page of the site that shows a file or a folder of the repository.

    Args:
      source: Path from the root of the repository, with `/`.
    """
    if source in ROOT_PAGES:
        return ROOT_PAGES[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source.endswith(".ipynb"):
        return f"notebooks/{posixpath.basename(source).removesuffix('.ipynb')}.md"
    return f"source/{source}/index.md" if (ROOT / source).is_dir() else f"source/{source}.md"


def rewrite(text: str, source: str) -> tuple[str, set[str]]:
    """Return a page with its links made right for the site, and the files that they lead to.

    Links inside fenced code are left alone, and so are links to what does not exist: the strict
    build names those. A badge, whose picture would be fetched, becomes a plain link.

    Args:
      text: Markdown of the page.
      source: Its path in the repository, from the root, with `/`.
    """
    targets: set[str] = set()
    here = posixpath.dirname(site_path(source)) or "."

    def replace(match: re.Match[str]) -> str:
        label, link = match[1], match[2]
        if re.match(r"[a-z]+:|#|<", link):
            return match[0]
        path, hash_sign, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / target).exists():
            return match[0]
        targets.add(target)
        if label.endswith(".md"):
            label = _title(target)
        return f"[{label}]({posixpath.relpath(site_path(target), here)}{hash_sign}{anchor})"

    text = _BADGE.sub(r"[\1](", text)
    parts, last = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replace, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, _LINK.sub(replace, text[last:])]), targets


def _title(target: str) -> str:
    """Return the first heading of a page, for links that are named after its file."""
    text = (ROOT / target).read_text("utf-8")
    return text.partition("# ")[2].partition("\n")[0]
