"""Sphinx settings of the documentation site, which `python -m docs.site` builds."""

import re
from typing import Any

project = "linen-transformer"
author = "the authors of this project"
html_title = "linen-transformer"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence", "deflist"]
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
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"

# Fields that Flax adds to every module.
_FLAX_FIELDS = re.compile(r", parent: .*?, name: str \\| None = None")


def _shorten_signature(*event: Any) -> tuple[str | None, str | None] | None:
    """Return the signature of a module without the fields that Flax adds."""
    signature, annotation = event[-2:]
    return (_FLAX_FIELDS.sub("", signature), annotation) if signature else None


def setup(app: Any) -> None:
    """Connect the changes of signatures."""
    app.connect("autodoc-process-signature", _shorten_signature)
