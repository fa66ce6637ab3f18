"""The messages of all errors, read from the source: each exception that is made with a text."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

VARIABLE = "…"
"""Stands for a part of a message that differs from case to case."""

_INTRODUCTION = f"""# All messages

Every error of this version, read from its source, with the file that raises it. `{VARIABLE}`
stands for a name or a number. [Errors and their remedies](../errors.md) says more about the
frequent ones. To find a message, search this page for a few of its words.
"""


class Message(NamedTuple):
    """The text of an error."""

    file: str
    line: int
    text: str
    error: str
    """Name of the exception's class, if it is a plain one."""


def messages() -> list[Message]:
    """Return the texts of all errors that `transformer` and `train` raise."""
    found = []
    for package in ("transformer", "train"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and (error := _class_name(node)).endswith("Error"):
                    found += [Message(name, node.lineno, text, error) for text in _texts(node)]
    return found


def _class_name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _texts(call: ast.Call) -> Iterator[str]:
    if call.args:
        text = template(call.args[0])
        if text is not None and text.strip(f"{VARIABLE} :"):
            yield text


def template(node: ast.expr) -> str | None:
    """Return a string literal with its variable parts as `VARIABLE`; None if it is none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(each) or VARIABLE for each in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = template(left), template(right)
            return None if sides == (None, None) else "".join(each or VARIABLE for each in sides)
    return None


def messages_page() -> str:
    """Return the page: a table for each folder."""
    folders: dict[str, list[Message]] = {}
    for message in messages():
        folders.setdefault(message.file.rpartition("/")[0], []).append(message)
    parts = [_INTRODUCTION]
    for folder, found in folders.items():
        rows = [
            f"| {_cell(each.text)} | `{each.file.rpartition('/')[2]}:{each.line}` |"
            for each in sorted(found, key=lambda each: each.text)
        ]
        parts.append(f"## {folder}\n\n| message | file |\n| --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    """Return a text as it is, in one cell of a table of Markdown."""
    escaped = text.replace("\\", "\\\\").replace("\n", " ")
    for sign in "|*_<>[]`$":
        escaped = escaped.replace(sign, f"\\{sign}")
    return escaped
