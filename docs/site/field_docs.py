"""Documentation of fields: the string literal or the comment after each field, from the source."""

import ast
import functools
import inspect
import textwrap


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
