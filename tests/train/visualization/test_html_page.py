"""Pages as files and as parts of a notebook, and the files that they are made of."""

import html
import json
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


def test_data_are_read_back_whatever_they_hold() -> None:
    data = {"texts": [*HOSTILE[:-1], "\u2028"], "numbers": [1.5, math.nan, math.inf], "none": None}
    page = build_page("a & b", "<main></main>", data, ["page.js", "attention.js"])
    assert check_page(page) == data | {"numbers": [1.5, None, None]}
    assert "<title>a &amp; b</title>" in page


def test_half_a_character_does_not_stop_a_page(tmp_path: Path) -> None:
    page = build_page("a", "", ["\ud800"], ["page.js", "report.js"])
    write_page(page, str(tmp_path / "page.html"))
    assert json.loads(json.dumps(check_page((tmp_path / "page.html").read_text()))) == ["\ud800"]
    with pytest.raises(UserError, match="No such file or directory"):
        write_page(page, str(tmp_path / "none" / "page.html"))


def test_a_wheel_has_every_file_that_is_no_code() -> None:
    """A missing pattern shows only in an installed package, where nobody tests."""
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
def test_a_frame_of_a_notebook_runs_the_page_in_isolation(tmp_path: Path) -> None:
    executable = find_chromium()
    assert executable is not None
    probe = '<main id="title"></main>'
    page = build_page("inner", probe, {"title": HOSTILE[0]}, ["page.js"])
    # Only the frame's own script can speak: it reports by a message, as it has no other way out.
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
