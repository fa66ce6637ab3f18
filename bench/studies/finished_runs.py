"""Results of the finished runs of a study, kept in git: docs/results/runs/STUDY.jsonl.

The work folder of a study stays on one machine. These files travel with the code, so that a study
that starts anew elsewhere trains only what is missing. Each line is one JSON object:

    {"base": {field: value, ...}}        all settings of a run
    {"name": ..., "base": 0, "fields": {...}, "without": [...], "result": {...}, "measured": {...},
     "commit": ..., "machine": ...}

`base` is the number of the base, `fields` has the settings that differ from it, and `without` names
those that only the base has. `result` is a `RunResult`, `measured` what the study read from the
run's folder, `commit` that of the code when the line was written, and `machine` the processor or
GPU that it was trained on; older lines lack it. Of equal runs the last line holds.

A run is found by its settings, whatever its name; one that starts from another run's weights, also
by the name of that one's folder, which has to name the settings that both do not share. A changed
value of any setting, a default's included, makes a new run, and so does another Python where the
corpus is the interpreter's own library. Not compared: how a run is named, logged and saved
(`IGNORED`). A setting that the package did not have when the line was written must have its default
value. The code is not compared either: whoever changes what a setting means, the corpus behind a
path, or how losses are evaluated, deletes the lines that this concerns.
"""

import dataclasses
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import commit, trained_on
from train.config.io import experiment_from_dict, experiment_to_dict, flatten_experiment
from train.errors import UserError
from train.experiment import Experiment
from train.runtime.writing import write_atomically
from train.sweep.grid import NO_WARM_START, SweepRun
from train.sweep.sweep_folder import RunResult

IGNORED = (
    "name",
    "log_every",
    "debug_checks",
    "checkpoint.",
    "tracking.",
    "profile",
    "data.cache_dir",
)
"""Prefixes of the settings that do not change what a run learns."""

PATHS = ("data.path", "data.validation_path", "data.test_path", "data.tokenizer.path")
"""Settings that hold the path of a file. Absolute paths are compared by their last two parts, as
the same corpus lies elsewhere on another machine."""


class FinishedRun(NamedTuple):
    """A line of the file."""

    fields: Mapping[str, Any]
    result: RunResult
    measured: Mapping[str, Any]
    machine: str


class FinishedRuns:
    """The file of a study. It need not exist."""

    def __init__(self, file: Path):
        self.file = file
        self._bases: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._runs: list[FinishedRun] = []
        for line in file.read_text().splitlines() if file.exists() else []:
            self._read(line)

    def _read(self, line: str) -> None:
        self._lines.append(line)
        entry = json.loads(line)
        if "result" not in entry:
            self._bases.append(entry["base"])
            return
        fields = {**self._bases[entry["base"]], **entry["fields"]}
        for name in entry["without"]:
            del fields[name]
        result, machine = RunResult(**entry["result"]), entry.get("machine", "")
        self._runs.append(FinishedRun(fields, result, entry["measured"], machine))

    def find(self, run: SweepRun) -> FinishedRun | None:
        """Return the last line of a run with these settings."""
        now = compared_fields(run)
        for each in reversed(self._runs):
            if _same(each.fields, now) and _has_defaults(run, now, each.fields):
                return each
        return None

    def add(self, run: SweepRun, result: RunResult, measured: Mapping[str, Any]) -> FinishedRun:
        """Write the result of a run to the file."""
        fields = compared_fields(run)
        if not self._bases:
            self._read(json.dumps({"base": fields}))
        changes = [_changes(base, fields) for base in self._bases]
        closest = min(range(len(changes)), key=lambda number: len(changes[number]))
        plain = {
            name: value
            for name, value in dataclasses.asdict(result).items()
            if value not in ("", {})
        }
        entry = {
            "name": run.name,
            "base": closest,
            "fields": changes[closest],
            "without": sorted(self._bases[closest].keys() - fields.keys()),
            "result": plain | {"seconds": round(result.seconds, 1)},
            "measured": dict(measured),
            "commit": commit(),
            "machine": trained_on(),
        }
        self._read(json.dumps(entry))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, "\n".join([*self._lines, ""]))
        return self._runs[-1]


def compared_fields(run: SweepRun) -> dict[str, Any]:
    """Return what decides the result of a run: its settings, and the name of where it starts."""
    start = {name: Path(value).name for name, value in run.warm_start.items() if value}
    return {**_settings(run.experiment), **start}


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that decide what a run learns, by dotted path."""
    fields = {
        name: _without_folder(value) if name in PATHS else value
        for name, value in flatten_experiment(experiment).items()
        if not name.startswith(IGNORED)
    }
    if str(fields.get("data.path", "")).startswith("python:"):
        fields["python"] = platform.python_version()
    return fields


def _without_folder(path: str) -> str:
    """Return `wikitext-2/train.txt` for `/home/me/data/wikitext-2/train.txt`."""
    return "/".join(Path(path).parts[-2:]) if Path(path).is_absolute() else path


def _changes(base: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the base lacks, or has with another value."""
    return {
        name: value
        for name, value in fields.items()
        if name not in base or not _equal(base[name], value)
    }


def _same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if no saved setting differs."""
    return all(name in now and _equal(now[name], value) for name, value in saved.items())


def _equal(one: Any, other: Any) -> bool:
    """Return True for equal values: 0 is 0.0, as a config may write it, but 1 is not True."""
    same: bool = one == other and isinstance(one, bool) == isinstance(other, bool)
    return same


def _has_defaults(run: SweepRun, now: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return True if every setting that was not saved has its default value."""
    if now.keys() == saved.keys():
        return True
    if (now.keys() - saved.keys()) & NO_WARM_START.keys():  # it started from random weights
        return False
    known = {name[:end] for name in saved for end in _ends(name)}

    def was_saved(value: Any, path: str) -> bool:
        # A part that had one kind only: all of it must be the default.
        new_kind = isinstance(value, dict) and "kind" in value and f"{path}.kind" not in known
        return (path in known and not new_kind) or f"{path}.".startswith(IGNORED)

    def as_saved(value: Any, path: str) -> Any:
        """Return plain data without the settings that were not saved."""
        if isinstance(value, list):
            return [as_saved(item, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(value, dict):
            parts = {name: f"{path}.{name}".removeprefix(".") for name in value}
            return {
                name: as_saved(value[name], part)
                for name, part in parts.items()
                if was_saved(value[name], part)
            }
        return value

    try:
        plain = as_saved(experiment_to_dict(run.experiment), "")
        completed = experiment_from_dict(plain, "settings of a finished run")
    except UserError:  # a setting has no default, or its default does not suit the others
        return False
    return _same(now, {**now, **_settings(completed)})


def _ends(name: str) -> list[int]:
    """Return where each part of a dotted path ends."""
    return [index for index, letter in enumerate(name) if letter == "."] + [len(name)]
