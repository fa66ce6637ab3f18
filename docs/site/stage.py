"""Collect all pages of the site in one folder."""

import shutil
from pathlib import Path

from docs.site.api_pages import API_PAGES, api_page
from docs.site.command_page import commands_page
from docs.site.links import ROOT_PAGES, rewrite, site_path
from docs.site.messages import messages_page
from docs.site.navigation import contents
from docs.site.settings_page import settings_page
from docs.site.source_pages import notebook_page, source_page

ROOT = Path(__file__).parents[2]


def stage(folder: Path) -> None:
    """Write every page of the site, with its pictures, to a folder that does not exist."""
    others = shutil.ignore_patterns("site", "__pycache__", "*.md")
    shutil.copytree(ROOT / "docs", folder, ignore=others)
    pages = {
        "reference/settings.md": settings_page(),
        "reference/commands.md": commands_page(),
        "reference/messages.md": messages_page(),
        **{f"reference/{name}.md": api_page(page) for name, page in API_PAGES.items()},
    }
    written = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    targets: set[str] = set()
    for source in [*ROOT_PAGES, *written]:
        text, found = rewrite((ROOT / source).read_text("utf-8"), source)
        pages[site_path(source)], targets = text, targets | found
    for notebook in sorted((ROOT / "colab").glob("*.ipynb")):
        source = str(notebook.relative_to(ROOT))
        text, found = rewrite(notebook_page(source), source)
        pages[site_path(source)], targets = text, targets | found
    for target in targets:
        if site_path(target) not in pages and not target.startswith("docs/"):
            pages[site_path(target)] = source_page(target)
    pages["index.md"] += contents(sorted(pages))
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
