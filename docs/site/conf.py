"""Sphinx settings of the documentation site, which `python -m docs.site` builds."""

import re
from typing import Any

from docutils import nodes
from sphinx.util import logging
from ziamath.config import config as formula_settings
from ziamath.zmath import Latex

from docs.site.repository import repository

project = "linen-transformer"
author = "the authors of this project"
html_title = "linen-transformer"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
source_suffix = {".md": "markdown"}
exclude_patterns = ["site"]

# Docstrings are plain text with code in single backticks.
default_role = "code"
smartquotes = False  # `--flag` keeps its hyphens
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
suppress_warnings = ["ref.python"]  # a plain word of a docstring may be the name of several fields
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_display_short_literal_types = True

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
if address := repository():
    html_theme_options["footer_icons"] = [
        {"name": "GitHub", "url": address, "html": "GitHub", "class": ""}
    ]
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_math_renderer = "svg"
copybutton_selector = "div:not(.output) > div.highlight pre"
copybutton_exclude = ".linenos, .gp, .go"

formula_settings.math.color = "currentColor"
formula_settings.svg2 = False  # each picture has its own glyphs

# Fields that Flax adds to every module.
_FLAX_FIELDS = re.compile(r", parent: .*?, name: str \\| None = None")


def _shorten_signature(*event: Any) -> tuple[str | None, str | None] | None:
    """Return the signature of a module without the fields that Flax adds."""
    signature, annotation = event[-2:]
    return (_FLAX_FIELDS.sub("", signature), annotation) if signature else None


def _visit_formula(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Draw a formula as a picture that needs no script, and no font of the reader's."""
    text, is_inline = node.astext(), isinstance(node, nodes.math)
    formula = Latex(text, size=17, inline=is_inline, title=text)
    if "\\" in formula.mathmlstr():
        logging.getLogger(__name__).warning("unknown command in %s", text, location=node)
    drop = formula.getyofst() - formula.margin  # below the line of the text
    tag = f'span style="vertical-align: {drop:.1f}px"' if is_inline else "div"
    kind = tag.partition(" ")[0]
    translator.body.append(f'<{tag} class="formula" role="img">{formula.svg()}</{kind}>')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Connect the changes of signatures, and the formulas."""
    app.connect("autodoc-process-signature", _shorten_signature)
    renderer = (_visit_formula, None)
    app.add_html_math_renderer("svg", inline_renderers=renderer, block_renderers=renderer)
