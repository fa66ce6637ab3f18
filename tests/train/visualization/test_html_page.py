"""Pages as files and in notebooks, and the files they are built from."""

import html
import math
import re
import tomllib
from pathlib import Path

import pytest

import train
from tests.chromium import Chromium, find_chromium
from tests.train.visualization.pages import HOSTILE, check_page, needs_chromium
from train.errors import UserError
from train.visualization.html_page import build_page, embed_page, write_page

PACKAGE = Path(str(train.__file__)).parent


def test_any_data_round_trip() -> None:
    data = {"texts": [*HOSTILE[:-1], "\u2028"], "numbers": [1.5, math.nan, math.inf], "none": None}
    page = build_page("page.html", data, ["page.js", "attention.js"], {"title": "a & b"})
    assert check_page(page) == data | {"numbers": [1.5, None, None]}
    assert "<title>a &amp; b</title>" in page


def test_lone_surrogates_are_written(tmp_path: Path) -> None:
    page = build_page("page.html", ["\ud800"], ["page.js", "report.js"], {"title": "\ud800"})
    write_page(page, str(tmp_path / "page.html"))
    assert check_page((tmp_path / "page.html").read_text()) == ["\ud800"]
    with pytest.raises(UserError, match="No such file or directory"):
        write_page(page, str(tmp_path / "none" / "page.html"))


def test_wheel_includes_all_data_files() -> None:
    """A missing pattern would show only in an installed package, which no test uses."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]
    others = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "py.typed"
    }
    packed = {
        path
        for package, names in patterns.items()
        if package.startswith("train")
        for name in names
        for path in PACKAGE.parent.joinpath(*package.split(".")).glob(name)
    }
    assert others
    assert others == packed


@needs_chromium
def test_notebook_frame_is_isolated(tmp_path: Path) -> None:
    executable = find_chromium()
    assert executable is not None
    page = build_page("page.html", {"title": HOSTILE[0]}, ["page.js"], {"title": "inner"})
    # The frame's script can report only by a message: it has no other access.
    speaking = re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", page).replace(
        "</body>", "<script>parent.postMessage([data.title, origin], '*')</script></body>"
    )
    assert html.escape(speaking, quote=True) in embed_page(speaking)
    script = "addEventListener('message', (event) => { window.said = event.data; });"
    notebook = f"<!doctype html><script>{script}</script>{embed_page(speaking)}"
    (tmp_path / "notebook.html").write_text(notebook)
    with Chromium(executable) as browser:
        browser.open(tmp_path / "notebook.html", "window.said")
        assert browser.evaluate("window.said") == [HOSTILE[0], "null"]
        document = "String(frames[0].document)"
        reach = f"(() => {{ try {{ return {document}; }} catch (e) {{ return e.name; }} }})()"
        assert browser.evaluate(reach) == "SecurityError"
