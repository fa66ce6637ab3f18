"""Races: contenders take turns in shuffled order and are compared by round.

On a shared machine, times taken at different moments are not comparable. Turns of a few steps
expose every contender to the same load, and the ratio within a round cancels it. A contender is a
process that speaks `bench.race.protocol`, with the interpreter of its own libraries.
"""

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TextIO, TypeVar

from rich.console import Console
from rich.table import Table

from bench.machine import Neighbours, gpu_name, machine

ROOT = Path(__file__).resolve().parents[2]
OURS = (sys.executable, "-m", "bench.race.ours")
"""Command of our side, but for the name of the work in `bench.race.ours`."""

T = TypeVar("T")


def interpreter(path: Path) -> str:
    """Return an interpreter's absolute path. Links are not followed: they would leave the venv."""
    executable = shutil.which(path)
    if executable is None:
        raise SystemExit(f"{path}: is not a program; give the path of a Python interpreter")
    return str(Path(executable).absolute())


def peer(python: Path, name: str) -> tuple[str, ...]:
    """Return the command of work in `bench.race.peers`."""
    return (interpreter(python), "-m", "bench.race.peers", name)


def print_machine(console: Console) -> None:
    """Print the processor, its cores, the GPU and the system in one line."""
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))


# A contender's process ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """Command to start from the root of the repository, and its settings for JSON."""

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """Measurements of one contender.

    seconds, cpu_seconds, losses: of its turn in every round; the loss is the last one.
    others: fraction of the machine's cores used by other processes in each turn, 0 to 1.
    """

    name: str
    versions: Mapping[str, str]
    facts: Mapping[str, int | float | str]
    build_seconds: float
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    others: tuple[float | None, ...]
    losses: tuple[float | None, ...]
    peak_memory_bytes: int


class Runner:
    """Contender's process. Every method exits with one line if the process has ended early."""

    def __init__(self, name: str, process: subprocess.Popen[str], errors: TextIO) -> None:
        self.name = name
        self._process = process
        self._errors = errors
        self._turns: list[dict[str, Any]] = []
        self._ready: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Wait until the contender is built and warmed up."""
        self._ready = self._listen()

    def turn(self, steps: int) -> float:
        """Run ``steps`` steps in the contender and return their seconds."""
        neighbours = Neighbours()
        turn = self._ask({"command": "run", "steps": steps})
        self._turns.append({**turn, "others": neighbours.share(turn["cpu_seconds"])})
        return float(turn["seconds"])

    def finish(self) -> Record:
        """Stop the contender and collect its record."""
        end = self._ask({"command": "quit"})
        return Record(
            name=self.name,
            versions=self._ready["versions"],
            facts=end["facts"],
            build_seconds=self._ready["build_seconds"],
            seconds=tuple(turn["seconds"] for turn in self._turns),
            cpu_seconds=tuple(turn["cpu_seconds"] for turn in self._turns),
            others=tuple(turn["others"] for turn in self._turns),
            losses=tuple(turn["loss"] for turn in self._turns),
            peak_memory_bytes=end["peak_memory_bytes"],
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise self._ended_early() from error
        return self._listen()

    def _listen(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended_early()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended_early(self) -> SystemExit:
        status = self._process.wait()
        self._errors.seek(0)
        last_output = (self._errors.read().strip().splitlines() or ["no message"])[-1]
        command: Any = self._process.args
        return SystemExit(
            f"{self.name}: ended early with status {status} ({last_output}); "
            f"to see all of it run {shlex.join(command)}"
        )


@contextmanager
def running(contender: Contender, warmup: int) -> Iterator[Runner]:
    """Start a contender, which builds its work and warms up, and end it on exit."""
    settings = json.dumps({**contender.settings, "warmup": warmup})
    with (
        # A file, not a pipe: nobody reads during a turn, and a full pipe would block the contender.
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            [*contender.command, settings],
            cwd=ROOT,
            # Contenders share an accelerator: none may reserve most of its memory.
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Runner(contender.name, process, errors)
        finally:
            process.kill()
            process.communicate()  # closes the pipes, even with a request that was never read


# Turns --------------------------------------------------------------------------------------------


def take_turns(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call every side once a round, in an order that is shuffled anew; return all results."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    shuffled = random.Random(0).sample
    with Console(stderr=True).status("") as status:
        for number in range(rounds):
            for name in shuffled(list(sides), len(sides)):
                status.update(f"round {number + 1} of {rounds}: {name}")
                results[name].append(sides[name]())
    return results


def race(contenders: Sequence[Contender], *, rounds: int, steps: int, warmup: int) -> list[Record]:
    """Build the contenders, then run ``steps`` steps of each in every round.

    Contenders are built one after the other; on a machine with a GPU, whose cores and memory
    suffice, all at once. `warmup` is the number of steps of each before the first turn.
    """
    together = bool(gpu_name())
    with ExitStack() as stack:
        runners = []
        with Console(stderr=True).status("building"):
            for contender in contenders:
                runners.append(stack.enter_context(running(contender, warmup)))
                if not together:
                    runners[-1].wait_until_ready()
            if together:
                for runner in runners:
                    runner.wait_until_ready()

        def turn_of(runner: Runner) -> Callable[[], float]:
            return lambda: runner.turn(steps)

        take_turns({runner.name: turn_of(runner) for runner in runners}, rounds)
        return [runner.finish() for runner in runners]


# Comparison ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Contender compared with the reference.

    rate: median over rounds, in units of work per second.
    ratio: median over rounds of this rate to the reference's in the same round; above 1 is faster.
    ratio_quartiles: the first and third quartile of those ratios.
    others: median fraction of the cores used by other processes in its turns, 0 to 1. Contenders do
        not suffer equally from other load: beyond a few hundredths, measure again.
    """

    record: Record
    rate: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    others: float | None


def compare(records: Sequence[Record], reference: str, work: float) -> list[Row]:
    """Compare the records with the one called ``reference``; ``work`` is done in every turn."""
    base = next(record.seconds for record in records if record.name == reference)
    rows = []
    for record in records:
        ratio, quartiles = spread([b / s for b, s in zip(base, record.seconds, strict=True)])
        shares = [share for share in record.others if share is not None]
        rate = median(work / seconds for seconds in record.seconds)
        rows.append(Row(record, rate, ratio, quartiles, median(shares) if shares else None))
    return rows


def spread(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median and quartiles of the values; a single value stands for all three."""
    if len(values) == 1:  # before Python 3.13, quantiles needs two values
        return values[0], (values[0], values[0])
    first, middle, third = quantiles(values, n=4, method="inclusive")
    return middle, (first, third)


def print_race(
    title: str,
    contenders: Sequence[Contender],
    *,
    reference: str,
    work: float,
    unit: str,
    rounds: int,
    steps: int,
    warmup: int,
) -> list[Row]:
    """Run a race and print the comparison with the contender called ``reference``.

    Args:
      title: Of the table.
      contenders: The sides.
      reference: Name of the side to which the others are compared.
      work: Units of work in a turn.
      unit: Unit of work, for example "tokens".
      rounds: Number of turns of each.
      steps: Steps in a turn.
      warmup: Steps of each before the first turn.
    """
    rows = compare(race(contenders, rounds=rounds, steps=steps, warmup=warmup), reference, work)
    # "others" is the fraction of the cores that other processes used meanwhile, "ready in" the
    # time to build and warm up.
    table = Table(
        "",
        f"{unit}/s",
        f"of {reference}",
        "quartiles",
        "others",
        "MiB",
        "ready in",
        "loss",
        title=f"{title}, {rounds} rounds",
        caption="\n".join(_versions_and_facts(row.record) for row in rows),
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        first, third = row.ratio_quartiles
        loss = row.record.losses[-1]
        table.add_row(
            row.record.name,
            f"{row.rate:,.0f}",
            f"{row.ratio:.2f}",
            f"{first:.2f}-{third:.2f}",
            "" if row.others is None else f"{row.others:.0%}",
            f"{row.record.peak_memory_bytes / 2**20:,.0f}",
            f"{row.record.build_seconds:.1f} s",
            "" if loss is None else f"{loss:.3f}",
        )
    Console().print(table)
    return rows


def _versions_and_facts(record: Record) -> str:
    versions = [f"{name} {version}" for name, version in record.versions.items()]
    facts = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in record.facts.items()
    ]
    return f"{record.name}: {', '.join(versions + facts)}"
