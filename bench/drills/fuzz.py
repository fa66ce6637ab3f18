"""Feed broken input to every reader: each case must succeed or end in a one-line error.

    python -m bench.drills.fuzz [--cases 10000] [--only WORD] [--seed 0] [--no-sweeps]

Run folders, settings, models, datasets and tokenizers, in process. Each case is a damaged
file or an implausible setting, drawn by Hypothesis. Anything but success or a UserError is a
finding, as are a case that takes longer than `SECONDS` and a file written outside the folder of the
case. Then the sweeps of `_fuzz_sweeps` try all cases of a class: every number of the settings,
every path, every field and file of a run, every command's output.
"""

import contextlib
import functools
import gzip
import io
import json
import pathlib
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import hypothesis
import tyro
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from bench.drills import _fuzz_sweeps, _fuzz_targets
from bench.drills._fuzz_numbers import Case
from bench.drills._fuzz_targets import Target
from train.errors import UserError

SECONDS = 30
SWEPT_SECONDS = 60
"""For a case of a sweep, which may trace a whole model or train a run."""
MEMORY = 2**20
"""KiB that a case of a sweep may add to the peak of the process."""


class HangError(Exception):
    """A case took too long."""


WORDS = st.sampled_from(["", "0", "-1", "1e400", "nan", "../../x", "/etc/passwd", "\0", "ü\u2028"])

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([10**30, -(2**63), 1e308]),
        st.floats(),
        st.text(max_size=9),
        WORDS,
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)
"""JSON values, and beyond JSON: NaN, infinities, half a surrogate pair."""


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Return every container in a tree, with each of its keys."""
    if isinstance(tree, dict | list):
        for key in list(tree if isinstance(tree, dict) else range(len(tree))):
            yield tree, key
            yield from places(tree[key])


@st.composite
def other_json(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the JSON with one value replaced, removed or joined by another (in one line)."""
    lines = data.splitlines()
    try:
        json.loads(data)
        chosen, lines = 0, [data]
    except ValueError:
        chosen = draw(st.integers(0, max(0, len(lines) - 1)))
    try:
        tree = [json.loads(lines[chosen])]
    except (ValueError, IndexError):
        return draw(st.binary(max_size=99))
    container, key = draw(st.sampled_from(list(places(tree))[:2000]))
    match draw(st.sampled_from(["replace", "delete", "add"])):
        case "replace":
            container[key] = draw(VALUES)
        case "delete":
            del container[key]
        case "add" if isinstance(container, dict):
            container[draw(st.text(max_size=9))] = draw(VALUES)
    lines[chosen] = json.dumps(tree[0] if tree else None).encode()
    return b"\n".join(lines)


@st.composite
def other_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the bytes truncated, or with some of them replaced."""
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 99)))
    new = draw(
        st.one_of(
            st.binary(max_size=99),
            st.text(max_size=30).map(lambda text: text.encode(errors="surrogatepass")),
            st.sampled_from([b"\0", b"\xff\xfe", b"\t", b"\r", b"\n\n", b"[" * 99_999, b'"']),
            st.sampled_from([b"9" * 5000, b"{}", b"a" * 999_999, "\u2028\ufeff".encode()]),
        )
    )
    rest = data[stop:] if draw(st.booleans()) else b""
    return data[:start] + new + rest


def inputs(target: Target) -> st.SearchStrategy[Any]:
    """Return a strategy for the input of a target."""
    if target.drawn is not None:
        return target.drawn
    if target.arguments is not None:
        value = WORDS | st.text(max_size=9) | st.sampled_from(["9" * 5000, "[" * 500, "1", "True"])
        names = st.sampled_from(target.arguments) | st.text(max_size=9).map("--{}".format)
        word = st.one_of(names, value, st.tuples(names, value).map("=".join))
        return st.lists(word, max_size=6)
    seeds = st.sampled_from(target.seeds)
    changed = seeds.flatmap(lambda seed: other_json(seed) | other_bytes(seed))
    intact = st.one_of(changed, changed, st.binary(max_size=300), seeds)
    if target.packed:
        packed = intact.map(lambda data: gzip.compress(data, 1))
        return st.one_of(packed, packed.flatmap(other_bytes), intact)
    return intact


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


def attempt(target: Target, root: pathlib.Path, given: Any, seconds: int = SECONDS) -> bool:
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
            target.use(folder, given)
        except UserError:
            refused = True
        except SystemExit as stop:
            if stop.code not in (0, 2):  # --help, and what tyro refuses
                raise
            refused = stop.code == 2
    assert [path.name for path in root.iterdir()] == ["folder"], "there is a file outside"
    return refused


def fuzz(target: Target, root: pathlib.Path, cases: int, seed: int) -> dict[str, int]:
    """Run many cases and count them. The first finding is shrunk and raised."""
    counts = {"cases": 0, "refused": 0}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=cases,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(inputs(target))
    def case(given: Any) -> None:
        counts["cases"] += 1
        counts["refused"] += attempt(target, root, given)

    case()
    return counts


def _alone(use: Callable[[pathlib.Path], object], folder: pathlib.Path, given: object) -> None:
    use(folder)


def sweep(cases: Iterable[Case], root: pathlib.Path) -> tuple[dict[str, int], list[str]]:
    """Run all cases of a class; return the counts and the findings."""
    counts, findings = {"cases": 0, "refused": 0}, []
    for name, use in cases:
        target = Target(name, functools.partial(_alone, use))
        counts["cases"] += 1
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            counts["refused"] += attempt(target, root, None, SWEPT_SECONDS)
        except (Exception, SystemExit) as error:  # noqa: BLE001, each is a finding
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            findings.append(
                f"{name}: {type(error).__name__} {text} ({where.filename}:{where.lineno})"
            )
        if (grown := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > MEMORY:
            findings.append(f"{name}: takes {grown // 1024} MiB")
    return counts, findings


def main(cases: int = 10_000, only: str = "", seed: int = 0, sweeps: bool = True) -> None:
    """Print a table; end with a traceback of the first random finding.

    Findings of the sweeps are listed at the end, and then the exit status is 1.

    Args:
      cases: Number of cases, divided over the targets by their speed.
      only: Run only the targets with this in their names.
      seed: Seed of the random cases.
      sweeps: Also try all cases of some classes.
    """
    findings: list[str] = []
    table = Table("input", "cases", "refused", "peak memory, MiB")
    with tempfile.TemporaryDirectory() as name:
        base = pathlib.Path(name)
        targets = [each for each in _fuzz_targets.targets(base / "run") if only in each.name]
        weight = sum(each.weight for each in targets) or 1
        for number, target in enumerate(targets):
            root = base / f"root-{number}"
            root.mkdir()
            counts = fuzz(target, root, -(-cases * target.weight // weight), seed)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            table.add_row(target.name, *map(str, counts.values()), str(peak))
        (base / "scratch").mkdir()
        for name, cases_of in _fuzz_sweeps.sweeps(base / "scratch").items() if sweeps else ():
            if only not in name:
                continue
            root = base / f"sweep-{name.replace(' ', '-')}"
            root.mkdir()
            counts, more = sweep(cases_of(), root)
            findings += more
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            table.add_row(f"all {name}", *map(str, counts.values()), str(peak))
    Console().print(table)
    for line in findings:
        print(line)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    tyro.cli(main)
