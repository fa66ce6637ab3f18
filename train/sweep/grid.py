"""Grid of a sweep: fields with several values, crossed with seeds, as named experiments."""

import dataclasses
import difflib
import hashlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.config.io import flatten_experiment
from train.errors import UsageError
from train.experiment import Experiment

ALIASES = dict.fromkeys(("lr", "optimizer.learning_rate"), "schedule.learning_rate")
"""Fields that many look for elsewhere: here the peak learning rate belongs to the schedule."""

MAX_NAME_LENGTH = 120
"""Longest name of a run. Names are folders, which have at most 255 bytes on most file systems."""

SEED = "seed"
"""Field that is not part of a setting: runs that differ in it alone are repetitions."""


NO_WARM_START = {"init_from": "", "init_only": "", "init_adapter": ""}
"""Arguments of `train.fit` that name weights to start with, without a value."""


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: an ordinary experiment, with its place in the sweep."""

    name: str
    """Name of the run's folder in the sweep's."""
    settings: Mapping[str, str]
    """Values of the swept fields, without the seed. Runs of equal settings are repetitions."""
    experiment: Experiment
    cost: float
    """Estimated compute in any unit, to weigh the runs in the time left."""
    warm_start: Mapping[str, str] = dataclasses.field(default_factory=NO_WARM_START.copy)
    """Values of some of the arguments in `NO_WARM_START`."""


def parse_grid(assignments: Sequence[str], base: Experiment) -> dict[str, list[str]]:
    """Return the values of each field, from texts such as `schedule.learning_rate=1e-3,3e-3`.

    A field may be given by its last name where that is unique: `learning_rate=1e-3,3e-3`. Items of
    a list are joined by plus signs: `lora.targets=query+value,all`.

    Raises:
      UsageError: An assignment has no values, or names no field or one that was given before.
    """
    known = known_fields(base)
    grid: dict[str, list[str]] = {}
    for assignment in assignments:
        name, _, values = assignment.partition("=")
        texts = list(dict.fromkeys(each.strip() for each in values.split(",") if each.strip()))
        if not (name and texts):
            raise UsageError(f"--set {assignment}: has no values; write --set FIELD=A,B")
        field = find_field(name.strip().removeprefix("--").replace("-", "_"), known)
        if field == SEED:
            raise UsageError(f"--set {assignment}: seeds are no setting; write --seeds N")
        if field in grid:
            raise UsageError(f"--set {assignment}: {field} is given twice; give its values once")
        grid[field] = texts
    return grid


def known_fields(experiment: Experiment) -> dict[str, Any]:
    """Return every setting by its dotted path; a list of plain values is one setting."""
    fields: dict[str, Any] = {}
    for path, value in flatten_experiment(experiment).items():
        parent, _, last = path.rpartition(".")
        if last.isdigit():
            fields[parent] = [*fields.get(parent, []), value]
        else:
            fields[path] = value
    return fields


def find_field(name: str, known: Mapping[str, Any]) -> str:
    """Return the dotted path of a field that is given by its path, an alias or its last names."""
    if name in known:
        return name
    if name in ALIASES:
        return ALIASES[name]
    matches = [field for field in known if field.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    # Places of a pattern have the same fields: the path says which.
    close = matches or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"choose one of {', '.join(close[:4])}" if close else "see fit CONFIG --help"
    problem = "is the name of several settings" if matches else "is not a setting of this config"
    raise UsageError(f"--set {name}: {problem}; {hint}")


def flag(field: str, value: str, current: Any) -> str:
    """Return the command-line flag that sets a field."""
    path = field.replace("_", "-")
    if isinstance(current, bool):  # a switch: --model.no-causal
        parent, dot, last = path.rpartition(".")
        switches = {"true": last, "false": f"no-{last}"}
        if value.lower() not in switches:
            raise UsageError(f"--set {field}={value}: is True or False; give one of them")
        return f"--{parent}{dot}{switches[value.lower()]}"
    if isinstance(current, list):
        value = value.replace("+", ",")
    return f"--{path}={value}"


def expand_grid(
    grid: Mapping[str, Sequence[str]],
    seeds: int,
    base: Experiment,
    build: Callable[[Sequence[str]], Experiment],
) -> list[SweepRun]:
    """Return the runs of a grid: every combination of values, with every seed.

    Seeds are the outer loop, so that a sweep that is stopped halfway has seen all settings.

    Args:
      grid: Values of each field, as text, by dotted path.
      seeds: Number of seeds, counted from that of the experiment.
      base: Experiment without the grid.
      build: Returns the experiment for additional command-line flags.

    Raises:
      UsageError: A value is not valid.
    """
    current = known_fields(base)
    points: list[tuple[dict[str, str], Experiment]] = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        flags = [flag(field, value, current.get(field)) for field, value in settings.items()]
        points.append((settings, build(flags)))
    runs = []
    for offset in range(seeds):
        for settings, experiment in points:
            seeded = dataclasses.replace(experiment, seed=experiment.seed + offset)
            name = run_name(settings, seeded.seed)
            cost = float(seeded.steps * max(seeded.batch_size, 1))
            runs.append(SweepRun(name, settings, seeded, cost))
    check_names(runs)
    return runs


def run_name(settings: Mapping[str, str], seed: int) -> str:
    """Return a folder name such as `learning_rate=1e-3,seed=0`."""
    labels = short_names(list(settings))
    parts = [f"{labels[field]}={value}" for field, value in settings.items()]
    name = re.sub(r"[^\w.+=,-]+", "_", ",".join([*parts, f"{SEED}={seed}"]))
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME_LENGTH - 40]}-{digest},{SEED}={seed}"


def short_names(fields: Sequence[str]) -> dict[str, str]:
    """Return the shortest end of each dotted path that no other of the fields ends with."""
    names = {}
    for field in fields:
        parts = field.split(".")
        ends = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        unique = (end for end in ends if sum(f".{x}".endswith(f".{end}") for x in fields) == 1)
        names[field] = next(unique, field)
    return names


def check_names(runs: Sequence[SweepRun]) -> None:
    """Raise UsageError if two runs would share a folder."""
    by_name: dict[str, SweepRun] = {}
    for run in runs:
        # Some file systems do not distinguish upper and lower case.
        other = by_name.setdefault(run.name.lower(), run)
        if other is not run:
            raise UsageError(
                f"runs {other.name} and {run.name}: have one name; give values that differ in more "
                "than signs or case"
            )
