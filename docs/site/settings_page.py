"""The reference of all settings, generated from the config classes."""

import dataclasses
import re
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docs.site.field_docs import field_docs
from train.config.io import classes_by_kind, kind_name
from train.experiment import Experiment

_INTRODUCTION = """# Settings

Every setting of an experiment, from the code of this version. A setting is a field of a frozen
dataclass in Python, a flag on the command line (`--checkpoint.keep-last 3`: dots between parts,
hyphens for underscores), and a line of a run's `config.txt`. Units, ranges and special values are
in the last column. Fields of type "one of" take `--PATH.kind`.
"""

_TITLES = {
    "": "Experiment",
    "model": "Model",
    "task": "Tasks",
    "data": "Data",
    "optimizer": "Optimizers",
    "schedule": "Learning rate schedules",
}


def settings_page() -> str:
    """Return the page: a table for each config class, in the order in which they are met."""
    parts: list[str] = [_INTRODUCTION]
    seen: set[type] = {Experiment}
    queue: list[tuple[str, type]] = [("", Experiment)]
    heading = None
    while queue:
        path, owner = queue.pop(0)
        top = path.split(".")[0]
        if top != heading:
            heading = top
            parts.append(f"## {_TITLES.get(top, top)}\n")
        parts.append(_section(path, owner))
        found = []
        for field, hint in _fields(owner):
            for each in _classes(hint):
                if each not in seen:
                    seen.add(each)
                    inner = f"{path}.{field.name}" if path else field.name
                    found.append((inner + (".0" if get_origin(hint) is tuple else ""), each))
        queue = found + queue
    return "\n".join(parts)


def setting_classes() -> set[type]:
    """Return every config class that an experiment can hold."""
    found: set[type] = set()
    queue: list[type] = [Experiment]
    while queue:
        owner = queue.pop()
        if owner not in found:
            found.add(owner)
            queue += [each for _, hint in _fields(owner) for each in _classes(hint)]
    return found


def _fields(owner: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(owner)
    for field in dataclasses.fields(owner):
        if field.init:
            yield field, hints[field.name]


def _classes(hint: Any) -> list[type]:
    """Return the config classes that a field of this type may hold."""
    if get_origin(hint) is tuple:
        return [each for item in get_args(hint) for each in _classes(item)]
    if kinds := classes_by_kind(hint):
        return list(dict.fromkeys(kinds.values()))
    members = get_args(hint) if _is_union(hint) else (hint,)
    return [each for each in members if _has_settings(each)]


def _has_settings(owner: Any) -> bool:
    # A precision policy is given by its name.
    return (
        isinstance(owner, type)
        and dataclasses.is_dataclass(owner)
        and owner.__name__ != "Precision"
    )


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _section(path: str, owner: type) -> str:
    kind = kind_name(owner)
    lines = [f"### {owner.__name__}\n"]
    lines.append(one_line((owner.__doc__ or "").partition("Attributes:")[0]) + "\n")
    if path:
        named = f", `kind`: `{kind}`" if kind != owner.__name__ else ""
        lines.append(f"Path: `{path}`{named}. Class: `{owner.__module__}.{owner.__name__}`.\n")
    docs = field_docs(owner)
    rows = [
        f"| `{field.name}` | {_type(hint)} | {_default(field)} | {one_line(docs[field.name])} |"
        for field, hint in _fields(owner)
    ]
    if not rows:
        return "\n".join([*lines, "No settings.\n"])
    return "\n".join(
        [*lines, "| field | type | default | effect |", "| --- | --- | --- | --- |", *rows, ""]
    )


def describe_field(field: dataclasses.Field[Any], hint: Any) -> tuple[str, str]:
    """Return the type and the default of a field, as cells of a table."""
    return _type(hint), _default(field)


def _type(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(hint))
    if get_origin(hint) is tuple:
        inner = " or ".join(_type(each) for each in get_args(hint) if each is not Ellipsis)
        return f"tuple of {inner}"
    classes = _classes(hint)
    if classes:
        names = [f"[{each.__name__}](#{each.__name__.lower()})" for each in classes]
        none = _is_union(hint) and type(None) in get_args(hint)
        shown = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
        return f"{shown} or none" if none else shown
    if _is_union(hint):
        return " or ".join(_type(each) for each in get_args(hint))
    return {type(None): "none"}.get(hint, getattr(hint, "__name__", str(hint)))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if dataclasses.is_dataclass(value) or (isinstance(value, tuple) and value):
        values = value if isinstance(value, tuple) else (value,)
        if all(map(dataclasses.is_dataclass, values)):
            return ", ".join(_config(each) for each in values)
    return "none" if value is None else f"`{value!r}`".replace("|", "\\|")


def _config(value: Any) -> str:
    name = type(value).__name__
    return f"`{value.name}`" if name == "Precision" else f"`{name}()`"


def one_line(text: str) -> str:
    """Return a docstring as one cell of a table; outside code, signs of Markdown are plain."""
    parts = re.sub(r"\s+", " ", text).strip().replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"[*<>]", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)
