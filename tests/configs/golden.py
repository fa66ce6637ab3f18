"""Golden files of the shipped experiments, one for each config file: `golden/<config file>.txt`.

A file has one section per experiment, with the settings that differ from their defaults, and one
named `*` for those that all of them share. `quickstart.txt` has all of its settings, so that a
changed default shows. Of the attention variants of `listops` and `byte_text`, which are built
alike, each is in one section. Read the difference, then regenerate the files:

    python -m tests.configs.golden
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import classes_by_kind, experiment_to_text, has_kind_field, kind_name
from train.experiment import Experiment
from transformer.precision import Precision

FOLDER = Path(__file__).parent / "golden"

Lines = set[tuple[str, str]]


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """Return the field's default; MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


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
        if classes_by_kind(hint) and not has_kind_field(
            type(value)
        ):  # one of several classes, whose settings are not comparable
            yield f"{prefix}kind", scalar(kind_name(type(value)))
        elif not changed:
            yield name, "{}"
        for key, inner in changed:
            yield from differences(inner, hints[key], prefix + key)
    else:
        yield name, scalar(value)


def is_recorded(file: str, experiment: str) -> bool:
    """Return True for an experiment with a section of its own."""
    if file == "listops":
        return experiment == "full" or experiment.startswith("arena_")
    return file != "byte_text" or experiment in ("full", "arena_full")


def golden() -> dict[str, str]:
    """Return the text of every golden file by its name."""
    files: dict[str, dict[str, Lines]] = {}
    for name in list_experiments():
        file, _, experiment = name.partition(":")
        if is_recorded(file, experiment):
            lines = set(differences(find_experiment(name), Experiment, ""))
            files.setdefault(f"{file}.txt", {})[experiment] = lines
    texts = {name: _file(sections) for name, sections in files.items()}
    return texts | {"quickstart.txt": experiment_to_text(find_experiment("quickstart"))}


def _file(sections: dict[str, Lines]) -> str:
    """Return the sections, after one named `*` of the lines that all of them have."""
    if len(sections) > 1:
        common = set.intersection(*sections.values())
        sections = {"*": common, **{name: lines - common for name, lines in sections.items()}}
    return "\n".join(
        f"[{title}]\n" + "".join(f"{name} = {value}\n" for name, value in sorted(lines))
        for title, lines in sections.items()
    )


def main() -> None:
    """Write the golden files."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for name, text in golden().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
