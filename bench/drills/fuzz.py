"""Feed broken input to every reader: each case must succeed or end in a one-line error.

    python -m bench.drills.fuzz [--cases 10000] [--only WORD]

Run folders, settings, models, datasets and tokenizers, in process. Each case is a damaged
file or an implausible setting, drawn by Hypothesis. Anything but success or a UserError is a
finding, as are a case that takes longer than `SECONDS` and a file written outside the folder of the
case. Then sweeps try all cases of a class: every number of the settings, every path, every field of
a run's JSON, every command's output.
"""

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import hypothesis
import tyro
from rich.console import Console
from rich.table import Table

import train
from bench.drills import _fuzz_targets as fuzz_targets
from bench.drills._fuzz_targets import Target, Use, kind_options, put
from bench.drills.faults import tiny
from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import experiment_from_dict, experiment_to_dict
from train.data.data_config import TokenizerConfig
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.estimate.plan import load_prices
from train.experiment import Experiment
from train.run_folder.folder import RunFolder

SECONDS = 30
SWEPT_SECONDS = 60
"""For a case of a sweep, which may trace a whole model or train a run."""
MEMORY = 2**20
"""KiB that a case of a sweep may add to the peak of the process."""

# Run cases.


class HangError(Exception):
    """A case took too long."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise HangError after this many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    # Repeated, because Python ignores exceptions raised in a callback of the garbage collector.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(use: Use, root: Path, given: Any, seconds: int = SECONDS) -> bool:
    """Run one case. Return True if the input was refused; raise unexpected errors."""
    folder = root / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    refused = False
    shown = io.StringIO()
    with (
        within(seconds),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
    ):
        try:
            use(folder, given)
        except UserError:
            refused = True
        except SystemExit as stop:
            if stop.code not in (0, 2):  # --help, and what tyro refuses
                raise
            refused = stop.code == 2
    assert [path.name for path in root.iterdir()] == ["folder"], "there is a file outside"
    return refused


def fuzz(target: Target, root: Path, cases: int) -> dict[str, int]:
    """Run many random cases and count them. The first finding is shrunk and raised."""
    counts = {"cases": 0, "refused": 0}

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(target.inputs)
    def case(given: Any) -> None:
        counts["cases"] += 1
        counts["refused"] += attempt(target.use, root, given)

    case()
    return counts


class Case(NamedTuple):
    """One input of a sweep: the name, its use, and what that is given."""

    name: str
    use: Use
    given: Any


def sweep(cases: Iterable[Case], root: Path) -> tuple[dict[str, int], list[str]]:
    """Run all cases of a class; return the counts and the findings."""
    counts, findings = {"cases": 0, "refused": 0}, []
    for name, use, given in cases:
        counts["cases"] += 1
        before = peak_memory()
        try:
            counts["refused"] += attempt(use, root, given, SWEPT_SECONDS)
        except (Exception, SystemExit) as error:  # noqa: BLE001, each is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            findings.append(
                f"{name}: {type(error).__name__} {text} ({where.filename}:{where.lineno})"
            )
        if (grown := peak_memory() - before) > MEMORY:
            findings.append(f"{name}: takes {grown // 1024} MiB")
    return counts, findings


def peak_memory() -> int:
    """Return the peak of this process in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# Sweep: every integer and float of the settings at extreme values.

INTEGERS = (-(2**63), -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**40)
FLOATS = (float("inf"), float("-inf"), float("nan"), 1e308, -1e308, -0.0)


def numbers() -> Iterator[Case]:
    """Yield every integer and float of every config, set to extreme values."""
    seen: set[tuple[str, str]] = set()
    tried: set[type] = set()
    files = sorted({name.partition(":")[0] for name in list_experiments()})
    for base in (shallow(find_experiment(name)) for name in files):
        for experiment in itertools.chain([base], other_kinds(base, tried)):
            plain = experiment_to_dict(experiment)
            for kind, path, value in numbers_of(experiment):
                key = kind, path.rpartition(".")[2]
                if key in seen:
                    continue
                seen.add(key)
                for other in INTEGERS if isinstance(value, int) else FLOATS:
                    changed = copy.deepcopy(plain)
                    put(changed, path, other)
                    name = f"{kind}: {path} = {other}"
                    yield Case(name, fuzz_targets.describe_model, changed)


def shallow(experiment: Experiment) -> Experiment:
    """Return the experiment with each block once, which traces faster."""
    model = experiment.model
    model = dataclasses.replace(model, num_layers=len(model.layer_pattern))
    if model.encoder is not None:
        encoder = dataclasses.replace(model.encoder, num_layers=len(model.encoder.layer_pattern))
        model = dataclasses.replace(model, encoder=encoder)
    return dataclasses.replace(experiment, model=model)


def other_kinds(base: Experiment, tried: set[type], within: str = "") -> Iterator[Experiment]:
    """Yield the experiment with each part replaced by each other kind, recursively.

    Args:
      base: The experiment.
      tried: Kinds to skip; those that are tried are added.
      within: Change only parts of the part of this name.
    """
    for path, known in kind_options(base):
        for kind, current_kind in known.items() if path.startswith(within) else ():
            if current_kind in tried:
                continue
            plain = experiment_to_dict(base)
            put(plain, path, {"kind": kind})
            try:
                other_experiment = experiment_from_dict(plain, "an experiment")
            except UserError:
                continue
            tried.add(current_kind)
            yield other_experiment
            yield from other_kinds(other_experiment, tried, f"{path}.")


def numbers_of(config: Any, path: str = "") -> Iterator[tuple[str, str, int | float]]:
    """Yield (class, dotted name, value) of every number."""
    if isinstance(config, tuple):
        for index, each in enumerate(config):
            yield from numbers_of(each, f"{path}.{index}")
    elif dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            value, name = getattr(config, field.name), f"{path}.{field.name}".lstrip(".")
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield type(config).__name__, name, value
            else:
                yield from numbers_of(value, name)


# Sweep: every setting that is a path, with each odd path.

ODD_PATHS: dict[str, Callable[[Path, str], str]] = {
    "folder": lambda folder, ending: make_folder(folder / f"odd{ending}"),
    "loop": lambda folder, ending: make_loop(folder / f"odd{ending}"),
    "no user": lambda folder, ending: f"~nouser/x{ending}",
    "NUL": lambda folder, ending: f"{folder}/a\0b{ending}",
    "newline": lambda folder, ending: f"{folder}/a\nb{ending}",
    "long": lambda folder, ending: f"{folder}/{'a' * 300}{ending}",
    "scheme": lambda folder, ending: f"nothing://x{ending}",
}


def make_folder(path: Path) -> str:
    """Make a folder."""
    path.mkdir()
    return str(path)


def make_loop(path: Path) -> str:
    """Make a link to itself."""
    path.symlink_to(path)
    return str(path)


def text_reader(name: str) -> Callable[[str, Path], object]:
    """Return a reader of a text with this setting."""
    return lambda path, folder: fuzz_targets.read_text(folder, **{name: path})


def read_with_tokenizer(path: str, folder: Path) -> None:
    """Read a text with a tokenizer's file."""
    fuzz_targets.read_text(folder, tokenizer=TokenizerConfig("file", path=path))


PATH_READERS: dict[str, tuple[str, Callable[[str, Path], object]]] = {
    "data.path": (".txt", text_reader("path")),
    "data.path, JSON lines": (".jsonl", text_reader("path")),
    "data.path, gzip": (".txt.gz", text_reader("path")),
    "data.validation_path": (".txt", text_reader("validation_path")),
    "data.test_path": (".txt", text_reader("test_path")),
    "data.cache_dir": ("", text_reader("cache_dir")),
    "data.tokenizer.path": (".json", read_with_tokenizer),
    "vocab.txt": (".txt", lambda path, _: Tokenizer.load(path)),
    "TSV": (".tsv", lambda path, _: fuzz_targets.read_labelled(path)),
    "CoNLL-U": (".conllu", lambda path, _: fuzz_targets.read_tagged(path)),
    "translations": (".en", lambda path, _: fuzz_targets.read_pairs(path.removesuffix(".en"))),
    "config": (".py", lambda path, _: find_experiment(path)),
    "prices": (".toml", lambda path, _: load_prices(path)),
    "workdir to read": ("", lambda path, _: RunFolder.open_existing(path)),
    "workdir to write": ("", lambda path, _: RunFolder.create(path)),
}
"""The ending of a path, and what reads it, of each setting."""


def paths() -> Iterator[Case]:
    """Yield each setting that is a path, with each odd path."""
    for setting in PATH_READERS:
        for kind in ODD_PATHS:
            yield Case(f"{setting}: {kind}", read_path, (setting, kind))


def read_path(folder: Path, given: tuple[str, str]) -> None:
    """Read an odd path as a setting."""
    setting, kind = given
    ending, read = PATH_READERS[setting]
    (folder / "good.txt").write_text("some words of a text\n" * 50)
    read(ODD_PATHS[kind](folder, ending), folder)


# Sweep: each field of each JSON file, of each other type.

OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**63, 10**400, -0.0),
    *(float("nan"), float("inf"), "", "x", "NaN", [], [None], {}, {"a": None}),
)
"""JSON values of other types."""

MAX_ENTRIES = 8
"""Of longer lists and objects, half as many entries are tried."""


def fields(scratch: Path) -> Iterator[Case]:
    """Yield each field of each JSON file with each other type."""
    for target in fuzz_targets.targets(scratch):
        for seed in target.seeds:
            for name, data in other_fields(seed):
                yield Case(f"{target.name}: {name}", target.use, data)


def other_fields(seed: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the file with one field of another type (for JSON lines, in the last line)."""
    try:
        before, tree = b"", [json.loads(seed)]
    except ValueError:
        first, _, last = seed.rstrip(b"\n").rpartition(b"\n")
        try:
            before, tree = first + b"\n", [json.loads(last)]
        except ValueError:
            return
    for path, container, key in list(fuzz_targets.places(tree, max_entries=MAX_ENTRIES)):
        value = container[key]
        for other in OTHERS:
            container[key] = other
            name = path.removeprefix(".0").removeprefix(".") or "all"
            yield f"{name} = {str(other)[:20]}", before + json.dumps(tree[0]).encode()
        container[key] = value


# Sweep: each command, with a full or closed standard output.


def outputs(scratch: Path) -> Iterator[Case]:
    """Yield each command with a full or closed output."""
    workdir = str(scratch / "whole")
    train.fit(tiny(scratch), workdir, quiet=True)
    commands = [
        *(["--help"], ["fit", "--help"], ["fit", "quickstart", "--help"], ["doctor"]),
        *(["describe", "quickstart"], ["describe", "quickstart", "--json"]),
        *(["plan", "quickstart", "--target", "h100:1", "--compile-best", "0"],),
        *(["evaluate", workdir], ["sample", workdir, "--prompt", "a"]),
        *(["goodput", workdir], ["goodput", workdir, "--json"], ["nothing"]),
    ]
    for command in commands:
        for kind in ("full", "closed", "unbuffered"):
            yield Case(f"{' '.join(command)}: {kind}", write_output, (command, kind))


def write_output(folder: Path, given: tuple[list[str], str]) -> None:
    """Run a command whose output cannot be written."""
    command, kind = given
    shell = f'exec "$0" -m train "$@" {">&-" if kind == "closed" else ">/dev/full"}'
    ran = subprocess.run(
        ["/bin/sh", "-c", shell, sys.executable, *command],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1" if kind == "unbuffered" else ""},
    )
    assert ran.returncode in (0, 1, 2), (ran.returncode, ran.stderr)
    assert "Traceback" not in ran.stderr, ran.stderr
    assert "Exception ignored" not in ran.stderr, ran.stderr
    if ran.returncode:
        raise UserError(ran.stderr)


def drill(cases: int = 10_000, only: str = "") -> int:
    """Print a table; end with a traceback of the first random finding.

    Findings of the sweeps are listed at the end, and then the exit status is 1.

    Args:
      cases: Number of cases, divided over the targets by their speed.
      only: Run only the targets and sweeps with this in their names.
    """
    findings: list[str] = []
    table = Table("input", "cases", "refused", "peak memory, MiB")

    def add_row(name: str, counts: dict[str, int]) -> None:
        table.add_row(name, *map(str, counts.values()), str(peak_memory() // 1024))

    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        targets = [each for each in fuzz_targets.targets(base / "run") if only in each.name]
        weight = sum(each.weight for each in targets)
        for number, target in enumerate(targets):
            root = base / f"root-{number}"
            root.mkdir()
            add_row(target.name, fuzz(target, root, -(-cases * target.weight // weight)))
        scratch = base / "scratch"
        scratch.mkdir()
        sweeps = {
            "numbers of settings": numbers(),
            "paths": paths(),
            "fields of JSON": fields(scratch / "checkpoints"),
            "standard output": outputs(scratch),
        }
        for name, swept in sweeps.items():
            if only in name:
                root = base / f"sweep-{name.replace(' ', '-')}"
                root.mkdir()
                counts, found = sweep(swept, root)
                findings += found
                add_row(f"all {name}", counts)
    Console().print(table)
    print("\n".join(findings))
    return int(bool(findings))


def main(argv: list[str]) -> int:
    """Run the drill with these arguments."""
    return tyro.cli(drill, args=argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
