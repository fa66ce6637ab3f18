"""Golden files of the shipped experiments: `golden/<config file>.txt` and `golden/defaults.txt`.

A config's file has one section per experiment, with the settings that differ from their
defaults, and one named `*` for those that all of them share; `defaults.txt` has the default
of every setting. So a changed default shows once, and a changed experiment shows in its own
section. Read the difference, then regenerate the files:

    python -m tests.configs.golden
"""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import all_classes_by_kind, classes_by_kind, kind_name
from train.data.data_config import ArrayDataConfig
from train.experiment import Experiment
from transformer.precision import Precision

FOLDER = Path(__file__).parent / "golden"

REQUIRED = object()


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the field's default, or REQUIRED if it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def scalar(value: Any) -> str:
    return json.dumps(value.name if isinstance(value, Precision) else value)


def differences(value: Any, hint: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield (path, value) of every setting of `value` that is not its class's default."""
    if isinstance(value, tuple):
        for index, element in enumerate(value):
            yield from differences(element, get_args(hint)[0], f"{name}.{index}")
        if not value:
            yield name, "[]"
    elif dataclasses.is_dataclass(value) and not isinstance(value, Precision):
        prefix, hints = f"{name}." if name else "", get_type_hints(type(value))
        changed = [
            (field.name, getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != default_of(field)
        ]
        if classes_by_kind(hint):  # one of several classes, whose settings are not comparable
            yield f"{prefix}kind", scalar(kind_name(type(value)))
        elif not changed:
            yield name, "{}"
        for key, inner in changed:
            yield from differences(inner, hints[key], prefix + key)
    else:
        yield name, scalar(value)


def config_classes(hint: Any = Experiment, found: dict[type, None] | None = None) -> list[type]:
    """Return every dataclass that an experiment may contain, in order of discovery."""
    found = {} if found is None else found
    for each in (*all_classes_by_kind(hint).values(), hint, *get_args(hint)):
        if inspect.isabstract(each):  # an interface, without settings
            continue
        if isinstance(each, type) and dataclasses.is_dataclass(each) and each not in found:
            found[each] = None
            if each is not Precision:
                for inner in get_type_hints(each).values():
                    config_classes(inner, found)
        elif get_args(each) and each is not hint:
            config_classes(each, found)
    return list(found)


def defaults() -> str:
    """Return the text of `defaults.txt`: every config class with the defaults of its fields."""
    sections = {}
    for each in config_classes():
        # Classes registered by tests and benchmarks exist only if their module was imported.
        # ArrayDataConfig is only reached through such tasks.
        ours = each.__module__.startswith(("train.", "transformer."))
        if each in (Precision, ArrayDataConfig) or not ours:
            continue
        hints, lines = get_type_hints(each), []
        for field in dataclasses.fields(each):
            value = default_of(field)
            if value is REQUIRED:
                lines.append((field.name, "(required)"))
            elif value == () or value is None:
                lines.append((field.name, scalar(value)))
            else:
                lines += differences(value, hints[field.name], field.name)
        sections[f"{each.__module__}.{each.__qualname__}"] = lines
    return "\n".join(_section(name, sections[name]) for name in sorted(sections))


def _section(title: str, lines: list[tuple[str, str]]) -> str:
    return f"[{title}]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(lines))


def golden() -> dict[str, str]:
    """Return the text of every golden file by its name."""
    files: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for name in list_experiments():
        file, _, experiment = name.partition(":")
        lines = list(differences(find_experiment(name), Experiment, ""))
        files.setdefault(f"{file}.txt", {})[experiment] = lines
    texts = {name: _file(sections) for name, sections in files.items()}
    return texts | {"defaults.txt": defaults()}


def _file(sections: dict[str, list[tuple[str, str]]]) -> str:
    """Return the sections, after one named `*` of the lines that all of them have."""
    if len(sections) > 1:
        common = set.intersection(*(set(lines) for lines in sections.values()))
        own = {name: [x for x in lines if x not in common] for name, lines in sections.items()}
        sections = {"*": list(common), **own}
    return "\n".join(_section(name, lines) for name, lines in sections.items())


def main() -> None:
    """Write the golden files."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for name, text in golden().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
