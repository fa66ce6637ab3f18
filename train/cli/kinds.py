"""`--optimizer.kind lion`: another kind of a part, before its settings are read.

The new kind has its own defaults; what was set for the old one is forgotten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from train.errors import UsageError
from train.kinds import classes_by_kind

Config = TypeVar("Config")


def select_kinds(config: Config, arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """The configuration with the kinds that are asked for, and the arguments that are left.

    Raises:
      UsageError: for a kind that is not known.
    """
    asked = _asked(arguments)
    chosen, used = _chosen(config, None, "", {path: kind for path, (kind, _) in asked.items()})
    taken = {index for path in used for index in asked[path][1]}
    return chosen, [each for index, each in enumerate(arguments) if index not in taken]


def kinds_help(config: Any) -> str:
    """The parts that may be of several kinds, for `--help`."""
    lines = [f"--{path}.kind {{{','.join(known)}}}" for path, known in kind_options(config)]
    return "\n".join(["Another kind brings its own settings:", *lines]) if lines else ""


def kind_options(config: Any) -> Iterator[tuple[str, Mapping[str, type]]]:
    """Every part that may be of several kinds: where it is, and its kinds by name."""
    for name, value, hint in _parts(config):
        if known := classes_by_kind(hint):
            yield name, known
        for inner, known in kind_options(value):
            yield f"{name}.{inner}", known


def _asked(arguments: Sequence[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What is given for each `--path.kind`, and at which places of the arguments."""
    asked: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not (name.startswith("--") and name.endswith(".kind")):
            continue
        path = name.removeprefix("--").removesuffix(".kind").replace("-", "_")
        if equals:
            asked[path] = value, (index,)
        elif index + 1 < len(arguments):
            asked[path] = arguments[index + 1], (index, index + 1)
    return asked


def _chosen(config: Any, hint: Any, path: str, asked: dict[str, str]) -> tuple[Any, set[str]]:
    """A part with the kinds that are asked for, of its own and within; and which of those it had.

    Each part is built once, when all within are chosen: kinds that need each other may change both.
    """
    used = set()
    if path in asked and (known := classes_by_kind(hint)):
        kind = asked[path]
        if kind not in known:
            raise UsageError(f"{path}.kind {kind}: is not known; give one of {', '.join(known)}")
        config = config if type(config) is known[kind] else known[kind]()
        used.add(path)
    changed = {}
    for name, value, inner in _parts(config):
        new, within = _chosen(value, inner, f"{path}.{name}" if path else name, asked)
        used |= within
        if new is not value:
            changed[name] = new
    if isinstance(config, tuple) and changed:
        config = tuple(changed.get(str(index), each) for index, each in enumerate(config))
    elif changed:
        config = dataclasses.replace(config, **changed)
    return config, used


def _parts(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a part is made of: (name, value, type hint), the entries of a tuple by their numbers."""
    if isinstance(config, tuple):
        yield from ((str(index), each, type(each)) for index, each in enumerate(config))
    elif dataclasses.is_dataclass(config):
        hints = get_type_hints(type(config))
        for field in dataclasses.fields(config):
            yield field.name, getattr(config, field.name), hints[field.name]
