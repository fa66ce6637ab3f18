"""Self-contained HTML pages: markup, styles, one script and its data in one file.

A page needs no network and is not able to use it: its content security policy forbids every
request, and allows only the script whose digest it names. Data are JSON in a script element that
no browser executes. `<` is escaped there, so that no text of the data can end the element.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from train.errors import as_user_error
from train.files import expand_path
from train.telemetry.event_log import finite_or_none

IFRAME_HEIGHT = 760
"""Height of a page in a notebook, in CSS pixels."""

ASSETS = jinja2.Environment(
    loader=jinja2.PackageLoader("train.visualization", "assets"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
"""Templates, styles and scripts of the pages (`assets/`)."""


def build_page(
    template: str,
    data: Any,
    scripts: Sequence[str],
    values: Mapping[str, Any],
) -> str:
    """Return a page.

    Args:
      template: Name of its template among the assets, which extends `page.html`.
      data: Value that the scripts read as JSON from the element `data`.
      scripts: Names of scripts among the assets, joined to one. The stylesheet of the last one
        follows the common one.
      values: Values of the template by name, `title` among them.
    """
    script = "\n".join(map(read_asset, scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    styles = read_asset("page.css") + read_asset(scripts[-1].replace(".js", ".css"))
    page = ASSETS.get_template(template).render(
        digest=digest,
        styles=styles,
        script=script,
        data=_to_json(data),
        **values,
    )
    # Lone surrogates, of file names, cannot be written as UTF-8.
    return page.encode("utf-8", "replace").decode()


def read_asset(name: str) -> str:
    """Return the text of a file in `assets/`, as it is."""
    assert ASSETS.loader is not None
    return ASSETS.loader.get_source(ASSETS, name)[0]


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
    # JSON has an escape for lone surrogates.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.replace("<", "\\u003c")
