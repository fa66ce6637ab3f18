"""Documentation of fields in `help()`: the string literal or the comment after each field.

They are read from the source when the documentation of a class is first asked for.
"""

import ast
import functools
import inspect
import textwrap
from types import ModuleType
from typing import SupportsIndex

_WIDTH = 92


class FieldDocs(str):
    """A class's `__doc__`: its docstring, which gets a section on the fields when it is read."""

    __slots__ = ("owner",)
    owner: type

    def __new__(cls, docstring: str, owner: type) -> "FieldDocs":
        docs = super().__new__(cls, docstring)
        docs.owner = owner
        return docs

    def __get__(self, instance: object, owner: type) -> str:
        return _with_fields(self.owner, str(self))

    def expandtabs(self, tabsize: int | SupportsIndex = 8) -> str:
        """Return the whole text. `pydoc` does not call `__get__` for classes with a metaclass."""
        return _with_fields(self.owner, str(self)).expandtabs(tabsize)


def document_fields(module: ModuleType) -> None:
    """Let `help()` show the documentation of the fields of a module's classes. Reads no source."""
    for each in list(vars(module).values()):
        if isinstance(each, type) and each.__module__ == module.__name__:
            docstring = vars(each).get("__doc__")
            if type(docstring) is str and hasattr(each, "__annotations__"):
                each.__doc__ = FieldDocs(docstring, each)


@functools.cache
def field_docs(owner: type) -> dict[str, str]:
    """Return the documentation of the fields of a class, those of its bases included, by name.

    Fields without one, and classes without source, are left out.
    """
    docs: dict[str, str] = {}
    for each in reversed(owner.__mro__):
        if each.__module__ == "builtins":
            continue
        try:
            source = textwrap.dedent(inspect.getsource(each))
            tree = ast.parse(source)
        except (OSError, TypeError, SyntaxError):
            continue
        definition = tree.body[0]
        body = definition.body if isinstance(definition, ast.ClassDef) else []
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = after.value if isinstance(after, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    docs[field.target.id] = inspect.cleandoc(text.value)
                elif comment := _comment(source, field):
                    docs[field.target.id] = comment
    return docs


def _comment(source: str, field: ast.AnnAssign) -> str:
    """Return the comment on the last line of a field, or else on the line before it."""
    lines = source.splitlines()
    last, column = field.end_lineno or field.lineno, field.end_col_offset or 0
    after = lines[last - 1].encode()[column:].decode().strip()
    above = lines[field.lineno - 2].strip()
    return next((each.lstrip("# ") for each in (after, above) if each.startswith("#")), "")


@functools.cache
def _with_fields(owner: type, docstring: str) -> str:
    lines = []
    for name, text in field_docs(owner).items():
        if f"\n  {name}: " not in inspect.cleandoc(docstring):
            lines += textwrap.wrap(
                f"{name}: {text}",
                _WIDTH,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    if not lines:
        return docstring
    text = inspect.cleandoc(docstring)
    section = "" if "\nAttributes:\n" in f"\n{text}" else "\n\nAttributes:"
    return "\n".join([text + section, *lines])
