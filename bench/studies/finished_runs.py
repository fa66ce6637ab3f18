"""Results of the finished runs of a study, kept in git: docs/results/runs/STUDY.jsonl.

The work folder of a study stays on one machine. These files travel with the code, so that a study
that starts anew elsewhere trains only what is missing. Each line is one JSON object:

    {"base": {field: value, ...}}        all settings of a first run
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
import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import commit, trained_on
from train.config.io import experiment_from_dict, experiment_to_dict, flatten_experiment
from train.errors import UserError
from train.experiment import Experiment
from train.runtime.writing import write_atomically
from train.sweep.grid import SweepRun
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

CORPUS_PATHS = ("data.path", "data.validation_path", "data.test_path")
"""Settings that hold the path of a corpus. Absolute paths are compared by their last two parts, as
the same corpus lies elsewhere on another machine."""

MAX_DIFFERENCES = 24
"""Settings in which a run may differ from a base; beyond, it becomes the base of others."""


class FinishedRun(NamedTuple):
    """A line of the file."""

    fields: Mapping[str, Any]
    result: RunResult
    measured: Mapping[str, Any]
    commit: str
    machine: str


class FinishedRuns:
    """The file of a study. It need not exist."""

    def __init__(self, file: Path):
        """Read the file.

        Raises:
          UserError: It is damaged.
        """
        self.file = file
        self._bases: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._runs: list[FinishedRun] = []
        self._found: dict[str, FinishedRun | None] = {}
        for number, line in enumerate(file.read_text().splitlines() if file.exists() else [], 1):
            try:
                self._read(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise UserError(
                    f"{file} line {number}: is not a result of a run; restore the file from git"
                ) from error
            self._lines.append(line)

    def _read(self, entry: dict[str, Any]) -> None:
        if "result" not in entry:
            self._bases.append(entry["base"])
            return
        fields = {**self._bases[entry["base"]], **entry["fields"]}
        for name in entry["without"]:
            del fields[name]
        result = RunResult(**entry["result"])
        machine = entry.get("machine", "")
        self._runs.append(FinishedRun(fields, result, entry["measured"], entry["commit"], machine))

    def find(self, run: SweepRun) -> FinishedRun | None:
        """Return the last line of a run with these settings."""
        now = _fields_of(run)
        key = json.dumps(now)
        if key not in self._found:  # a second for ten runs
            self._found[key] = next(
                (
                    each
                    for each in reversed(self._runs)
                    if _same(each.fields, now) and _has_defaults(run.experiment, now, each.fields)
                ),
                None,
            )
        return self._found[key]

    def measured(self, run: SweepRun) -> Mapping[str, Any]:
        """Return what the study read from the folder of a finished run."""
        found = self.find(run)
        assert found is not None, run.name
        return found.measured

    def describe_machines(self, runs: Iterable[SweepRun]) -> str:
        """Return what the runs were trained on: `NVIDIA H200 (25 runs)`; equal runs count once.

        Empty if no line says so.
        """
        found = {json.dumps(_fields_of(run)): self.find(run) for run in runs}
        counts = Counter(each.machine or "not recorded" for each in found.values() if each)
        if counts.keys() <= {"not recorded"}:
            return ""
        return ", ".join(
            f"{name} ({count} {'run' if count == 1 else 'runs'})"
            for name, count in counts.most_common()
        )

    def add(self, run: SweepRun, result: RunResult, measured: Mapping[str, Any]) -> None:
        """Write the result of a run to the file."""
        fields = _fields_of(run)
        differences = [_differences(base, fields) for base in self._bases]
        sizes = [len(each.fields) + len(each.without) for each in differences]
        closest = min(range(len(sizes)), key=sizes.__getitem__, default=0)
        if not sizes or sizes[closest] > MAX_DIFFERENCES:
            closest = len(self._bases)
            self._append({"base": fields})
            differences.append(Difference({}, []))
        plain = {
            name: value
            for name, value in dataclasses.asdict(result).items()
            if value not in ("", {})
        }
        plain["seconds"] = round(result.seconds, 1)
        entry = {
            "name": run.name,
            "base": closest,
            **differences[closest]._asdict(),
            "result": plain,
            "measured": dict(measured),
            "commit": commit(),
            "machine": trained_on(),
        }
        self._append(entry)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, "\n".join([*self._lines, ""]))

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry)
        self._found.clear()
        self._read(json.loads(line))
        self._lines.append(line)


def _fields_of(run: SweepRun) -> dict[str, Any]:
    """Return what decides the result of a run: its settings, and the name of where it starts."""
    start = {name: Path(value).name for name, value in run.warm_start.items() if value}
    return {**compared_fields(run.experiment), **start}


def compared_fields(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that decide what a run learns, by dotted path."""
    fields = {
        name: _without_folder(value) if name in CORPUS_PATHS else value
        for name, value in flatten_experiment(experiment).items()
        if not name.startswith(IGNORED)
    }
    if str(fields.get("data.path", "")).startswith("python:"):
        fields["python"] = platform.python_version()
    plain: dict[str, Any] = json.loads(json.dumps(fields))
    return plain


def _without_folder(path: str) -> str:
    """Return `wikitext-2/train.txt` for `/home/me/data/wikitext-2/train.txt`."""
    return "/".join(Path(path).parts[-2:]) if Path(path).is_absolute() else path


def digest(*experiments: Experiment) -> str:
    """Return 12 characters that change with every setting that decides what the runs learn.

    The path of a tokenizer does not count: where it comes from another run, give that one too.
    """
    fields = []
    for each in experiments:
        plain, whole = compared_fields(each), flatten_experiment(each)
        plain.pop("data.tokenizer.path", None)
        # A work folder stays where it is: another place of a corpus may be another corpus.
        fields.append(plain | {name: whole[name] for name in CORPUS_PATHS if name in whole})
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


class Difference(NamedTuple):
    """Settings of a run as they differ from a base."""

    fields: dict[str, Any]
    without: list[str]


def _differences(base: Mapping[str, Any], fields: Mapping[str, Any]) -> Difference:
    """Return how the settings of a run differ from a base."""
    changed = {
        name: value
        for name, value in fields.items()
        if name not in base or not _equal(base[name], value)
    }
    return Difference(changed, sorted(base.keys() - fields.keys()))


def _same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if no saved setting differs."""
    return all(name in now and _equal(now[name], value) for name, value in saved.items())


def _equal(one: Any, other: Any) -> bool:
    """Return True for equal values: 0 is 0.0, as a config may write it, but 1 is not True."""
    same: bool = one == other and isinstance(one, bool) == isinstance(other, bool)
    return same


def _has_defaults(experiment: Experiment, now: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Return True if every setting that was not saved has its default value."""
    newer = now.keys() - saved.keys()
    if not newer:
        return True
    known = {tuple(name.split(".")[:length]) for name in saved for length in _lengths(name)}
    without = experiment_to_dict(experiment)
    for name in newer:
        parts = tuple(name.split("."))
        # A new part with settings of its own is left out whole.
        new = next(parts[:length] for length in _lengths(name) if parts[:length] not in known)
        if new[-1] == "kind":  # of a part that had one kind only: all of it must be the default
            new = new[:-1]
        parent: Any = without
        for part in new[:-1]:
            parent = parent[int(part)] if isinstance(parent, list) else parent.get(part, {})
        if isinstance(parent, list):
            return False  # an item more than the saved list has
        parent.pop(new[-1], None)
    try:
        completed = experiment_from_dict(without, "settings of a finished run")
    except UserError:  # it has no default, or its default does not suit the others
        return False
    return _same(now, {**now, **compared_fields(completed)})


def _lengths(name: str) -> range:
    """Return the numbers of leading parts of a dotted path."""
    return range(1, name.count(".") + 2)
