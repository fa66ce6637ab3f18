"""Shared parts of the page tests: a parser that checks a page, and a browser if installed."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.chromium import find_chromium

HOSTILE = (
    "</script><img src=x onerror=\"document.title='broken'\">",
    "<!--",
    "&lt;b&gt;",
    "‮evil",
    "שלום",
    "a​b",
    "${document.title='broken'}",
    "\ud800",
)
"""Texts that would break a page which does not escape them."""

needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="no chromium here: apt-get install chromium"
)


class PageParser(HTMLParser):
    """Collect the elements of a page, its scripts and its data."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[str] = []
        self.json_texts: list[str] = []
        self._is_json: bool | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "script":
            self._is_json = ("type", "application/json") in attrs
            (self.json_texts if self._is_json else self.scripts).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._is_json = None

    def handle_data(self, text: str) -> None:
        if self._is_json is not None:
            (self.json_texts if self._is_json else self.scripts)[-1] += text


def check_page(page: str) -> Any:
    """Check that a page needs no network and runs only its own script; return its data."""
    parser = PageParser()
    parser.feed(page)
    parser.close()
    assert parser.tags.count("script") == 2
    (script,), (text,) = parser.scripts, parser.json_texts
    loading = {"src", "href", "srcset", "action", "data", "poster", "background"}
    for tag, name, value in parser.attributes:
        assert name not in loading, (tag, name, value)
        assert not name.startswith("on"), (tag, name, value)
    policies = [v for tag, name, v in parser.attributes if (tag, name) == ("meta", "content")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [each for each in policies if each and "default-src" in each]
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "url(" not in page.split("</style>")[0]
    assert not {"img", "link", "iframe", "object", "base", "form"} & set(parser.tags)
    return json.loads(text)
