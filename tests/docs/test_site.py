"""The documentation site: links of its pages, its generated reference, and the strict build."""

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("ziamath") is None:
    pytest.skip("the site's generator is not installed; install .[docs]", allow_module_level=True)

from docs.site.api_pages import undocumented_names
from docs.site.messages import messages
from docs.site.navigation import SECTIONS, page_of
from docs.site.settings_page import settings_page
from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import flatten_experiment

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_in_the_reference() -> None:
    assert undocumented_names() == []


def test_every_setting_of_every_shipped_config_is_in_the_reference() -> None:
    page = settings_page()
    for name in list_experiments():
        for field in flatten_experiment(find_experiment(name)):
            last = field.rpartition(".")[2]
            assert last == "kind" or last.isdigit() or f"| `{last}` |" in page, field


def test_error_page_quotes_real_messages() -> None:
    """A quoted message is one that the source raises, with its variable parts as `…`."""
    known = [each.text for each in messages()]
    text = (ROOT / "docs" / "errors.md").read_text("utf-8")
    quoted = [row.split(" | ")[0] for row in text.splitlines() if row.startswith("| `")]
    assert len(quoted) > 20
    for row in quoted:
        ticks = "``" if row.startswith("| ``") else "`"  # a message may contain backticks
        message = row.removeprefix(f"| {ticks}").removesuffix(ticks).strip()
        assert message in known, message


class _Links(HTMLParser):
    """Collect what a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "img": "src", "link": "href", "iframe": "src"}
        self.loaded += [value for name, value in attrs if value and name == names.get(tag)]


@pytest.mark.full
def test_site_builds_without_warnings_or_network_resources(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site"
    folders = ["--output", str(site), "--pages", str(tmp_path / "pages")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "docs.site", *folders]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    pages = sorted(site.rglob("*.html"))
    for page in pages:
        links = _Links()
        links.feed(page.read_text("utf-8"))
        assert [each for each in links.loaded if each.startswith(("http", "//"))] == []
    notebook = (site / "notebooks" / "transformer_inside.html").read_text("utf-8")
    assert 'class="formula" role="img"><svg' in notebook
    assert 'src="data:image/png;base64,' in notebook  # what its cells draw
    written = {str(page.relative_to(site).with_suffix("")) for page in pages}
    assert {page_of(each) for group in SECTIONS.values() for each in group} <= written
