"""The documentation site: links of its pages, its generated reference, and the strict build."""

import ast
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("jupytext") is None:
    pytest.skip("the site's generator is not installed; install .[docs]", allow_module_level=True)

from docs.site.api_pages import undocumented_names
from docs.site.command_page import commands_page
from docs.site.links import rewrite, site_path
from docs.site.messages import messages, template
from docs.site.navigation import SECTIONS, contents, page_of
from docs.site.settings_page import one_line, setting_classes, settings_page
from train.cli.main import VERBS
from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import flatten_experiment
from transformer.field_docs import field_docs

ROOT = Path(__file__).parents[2]


def test_links_out_of_docs_point_to_site_pages() -> None:
    text = "[a](../README.md#x) [resume.md](resume.md) [b](https://e.org) [c](#d)\n```\n[e](f)\n```"
    actual, targets = rewrite(text, "docs/training.md")
    assert actual == (
        "[a](index.md#x) [Checkpoints and resume](resume.md) [b](https://e.org) [c](#d)\n"
        "```\n[e](f)\n```"
    )
    assert targets == {"README.md", "docs/resume.md"}


def test_files_and_folders_have_pages() -> None:
    assert site_path("train/loop.py") == "source/train/loop.py.md"
    assert site_path("configs") == "source/configs/index.md"
    assert site_path("colab/translate.ipynb") == "notebooks/translate.md"


def test_unlisted_pages_are_included() -> None:
    assert ":caption: More\n\nnew_page\n" in contents(["training.md", "new_page.md"])


def test_every_public_name_is_in_the_reference() -> None:
    assert undocumented_names() == []


def test_every_setting_of_every_shipped_config_is_in_the_reference() -> None:
    page = settings_page()
    for name in list_experiments():
        for field in flatten_experiment(find_experiment(name)):
            last = field.rpartition(".")[2]
            assert last == "kind" or last.isdigit() or f"| `{last}` |" in page, field


def test_every_settings_class_has_a_table_with_effects() -> None:
    page = settings_page()
    for owner in setting_classes():
        section = page.partition(f"### {owner.__name__}\n")[2].partition("\n###")[0]
        for field in dataclasses.fields(owner):
            if field.init:
                effect = one_line(field_docs(owner)[field.name])
                assert effect, (owner, field.name)
                row = section.partition(f"\n| `{field.name}` |")[2].partition("\n")[0]
                assert row.endswith(f"| {effect} |"), (owner, field.name)


def test_every_verb_is_in_the_reference() -> None:
    page = commands_page()
    assert all(f"\n## {verb}\n" in page for verb in VERBS)
    assert "| `--max-new-tokens` | int | `" in page


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


def test_errors_for_users_name_the_thing_the_problem_and_the_remedy() -> None:
    passed_on = {"lora.…", "sample.prompt …: …", "scaling: ……"}  # the rest is another error's text
    found = [
        each for each in messages() if each.error in ("UserError", "UsageError", "InteropError")
    ]
    assert len(found) > 300
    incomplete = {
        each.text
        for each in found
        # The problem may go without saying: `seed -1: give an integer from 0 to 2^32 - 1`.
        if not re.search(r"; |: give |: name ", each.text) and each.text not in passed_on
    }
    assert incomplete == set()


def test_messages_are_parsed_with_their_variable_parts() -> None:
    source = 'f"field {name}: is {1 + 1}; " + "give " + names'
    node = ast.parse(source, mode="eval").body
    assert template(node) == "field …: is …; give …"


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
    written = {str(page.relative_to(site).with_suffix("")) for page in pages}
    assert {page_of(each) for group in SECTIONS.values() for each in group} <= written
