"""Self-contained HTML pages: markup, styles, one script and its data in one file.

A page needs no network and is not able to use it: its content security policy forbids every
request, and allows only the script whose digest it names. Data are JSON in a script element that
no browser executes. `<` is escaped there, so that no text of the data can end the element.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from train.errors import as_user_error
from train.files import expand_path
from train.telemetry.event_log import finite_or_none

ASSETS = "assets"
"""Folder of this package with markup, styles and scripts (`*.html`, `*.css`, `*.js`)."""

IFRAME_HEIGHT = 760
"""Height of a page in a notebook, in CSS pixels."""


def read_asset(name: str) -> str:
    """Return the text of a file in `assets/`."""
    return (resources.files(__package__) / ASSETS / name).read_text(encoding="utf-8")


def build_page(title: str, body: str, data: Any, scripts: Sequence[str]) -> str:
    """Return a page.

    Args:
      title: Title of the page, as text.
      body: Markup of the page's body: an asset, without text from outside.
      data: Value that the scripts read as JSON from the element `data`.
      scripts: Names of scripts among the assets, joined to one. The stylesheet of the last one,
        if there is one, follows the common one.
    """
    script = "\n".join(map(read_asset, scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    styles = read_asset("page.css") + read_asset(scripts[-1].replace(".js", ".css"))
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(_without_surrogates(title))}</title>",
            f"<style>\n{styles}</style>",
            "</head>",
            "<body>",
            body,
            f'<script type="application/json" id="data">{_to_json(data)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>\n",
        )
    )


def embed_page(page: str, height: int = IFRAME_HEIGHT) -> str:
    """Return markup that shows a page in a notebook, isolated from the notebook's own page."""
    source = html.escape(page, quote=True)
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{source}" loading="lazy" '
        f'style="width:100%;height:{height}px;border:0" title="visualization"></iframe>'
    )


def write_page(page: str, output: str) -> None:
    """Write a page to a local or remote path. Raises UserError if that fails."""
    with as_user_error(output):
        expand_path(output).write_text(page, encoding="utf-8")


def _to_json(data: Any) -> str:
    data = finite_or_none(data)
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Lone surrogates, of file names, cannot be written as UTF-8; JSON has an escape for them.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("<", "\\u003c")


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
