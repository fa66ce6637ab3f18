"""Write a commented config file of the user's own."""

import json
import pathlib
import re
from importlib import resources

from train.errors import UsageError, as_user_error

TEMPLATE = "new_config.py.template"
"""File beside this module: the text of a config, in which `write_config` fills names."""

EXAMPLE_DATA = "python:library"
"""Text that every Python carries, so that a new config can be tried at once."""


def write_config(file: str, data: str = "") -> None:
    """Write a config file for a language model on text.

    Args:
      file: Path of a .py file that does not exist yet.
      data: File, folder or pattern of text; empty: `EXAMPLE_DATA`.

    Raises:
      UserError: The file exists, has another ending, or cannot be written.
    """
    path = pathlib.Path(file)
    if path.suffix != ".py":
        raise UsageError(f"init {file}: is no .py file; give a name such as {path.stem}.py")
    name = re.sub(r"\W+", "_", path.stem).strip("_") or "mine"
    source = data or EXAMPLE_DATA
    text = (resources.files(__package__) / TEMPLATE).read_text(encoding="utf-8")
    filled = text.format(
        docstring=f"{name}: a language model of my own.",
        file=_in_docstring(file),
        name=json.dumps(name),
        path=json.dumps(source, ensure_ascii=False),  # a string of Python too
        prompt=json.dumps("The " if data else "def "),
    )
    with as_user_error(file):
        try:
            with path.open("x", encoding="utf-8") as created:
                created.write(filled)
        except FileExistsError:
            raise UsageError(f"init {file}: exists already; give another name") from None


def _in_docstring(file: str) -> str:
    """Return a path as a docstring can hold it."""
    return file.replace("\\", "/").replace('"', "'")
