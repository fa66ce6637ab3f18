"""Races: contenders take turns in shuffled order and are compared by round.

On a shared machine, times taken at different moments are not comparable. Turns of a few steps
expose every contender to the same load, and the ratio within a round cancels it. A contender is a
process that speaks `bench.race.protocol`, with the interpreter of its own libraries.
"""

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import machine

ROOT = Path(__file__).resolve().parents[2]
OURS = (sys.executable, "-m", "bench.race.ours")
"""Command of our side, but for the name of the work in `bench.race.ours`."""

T = TypeVar("T")


def peer(python: Path, name: str) -> tuple[str, ...]:
    """Return the command of work in `bench.race.peers`."""
    # Links are not followed: they would leave the virtual environment.
    return (str(python.absolute()), "-m", "bench.race.peers", name)


def print_machine() -> None:
    """Print the processor, its cores, the GPU and the system in one line."""
    Console().print(", ".join(f"{name} {value}" for name, value in machine().items()))


# A contender's process ----------------------------------------------------------------------------


class Contender(NamedTuple):
    """Command to start from the root of the repository, and its settings for JSON."""

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """Measurements of one contender.

    seconds, cpu_seconds, losses: of its turn in every round; the loss is the last one.
    """

    name: str
    facts: Mapping[str, int | str]
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    losses: tuple[float | None, ...]
    peak_memory_bytes: int

    def rate(self, work: float) -> float:
        """Return units of work per second, the median over rounds; a turn does `work` units."""
        return median(work / seconds for seconds in self.seconds)


class Runner:
    """Contender's process; what it writes to standard error is shown."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process
        self._turns: list[dict[str, Any]] = []

    def listen(self) -> dict[str, Any]:
        """Wait for the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: ended early with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def turn(self, steps: int) -> float:
        """Run ``steps`` steps in the contender and return their seconds."""
        print(steps, file=self._process.stdin, flush=True)
        self._turns.append(self.listen())
        return float(self._turns[-1]["seconds"])

    def finish(self) -> Record:
        """Stop the contender and collect its record."""
        print(0, file=self._process.stdin, flush=True)
        return Record(
            name=self.name,
            seconds=tuple(turn["seconds"] for turn in self._turns),
            cpu_seconds=tuple(turn["cpu_seconds"] for turn in self._turns),
            losses=tuple(turn["loss"] for turn in self._turns),
            **self.listen(),
        )


@contextmanager
def running(contender: Contender, warmup: int) -> Iterator[Runner]:
    """Start a contender, wait until it has built its work and warmed up, and end it on exit."""
    settings = json.dumps({**contender.settings, "warmup": warmup})
    with subprocess.Popen(
        [*contender.command, settings],
        cwd=ROOT,
        # Contenders share an accelerator: none may reserve most of its memory.
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            runner = Runner(contender.name, process)
            runner.listen()
            yield runner
        finally:
            process.kill()


# Turns --------------------------------------------------------------------------------------------


def take_turns(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call every side once a round, in an order that is shuffled anew; return all results."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    shuffled = random.Random(0).sample
    for _ in range(rounds):
        for name in shuffled(list(sides), len(sides)):
            results[name].append(sides[name]())
    return results


def race(contenders: Sequence[Contender], *, rounds: int, steps: int, warmup: int) -> list[Record]:
    """Build the contenders one after the other, then run ``steps`` steps of each in every round.

    `warmup` is the number of steps of each before the first turn.
    """
    with ExitStack() as stack:
        runners = [stack.enter_context(running(each, warmup)) for each in contenders]
        turns = {each.name: functools.partial(each.turn, steps) for each in runners}
        take_turns(turns, rounds)
        return [runner.finish() for runner in runners]


def ratios(reference: Sequence[float], seconds: Sequence[float]) -> tuple[str, str]:
    """Return median and quartiles of the speed beside the reference's in the same round."""
    each = [base / own for base, own in zip(reference, seconds, strict=True)]
    first, middle, third = np.quantile(each, (0.25, 0.5, 0.75))
    return f"{middle:.2f}", f"{first:.2f}-{third:.2f}"


def print_race(
    title: str,
    contenders: Sequence[Contender],
    *,
    work: float,
    rounds: int,
    steps: int = 1,
    warmup: int = 1,
    unit: str = "tokens",
) -> list[Record]:
    """Run a race and print the comparison with the last contender.

    Args:
      title: Of the table.
      contenders: The sides.
      work: Done in a turn, in `unit`.
      rounds: Number of turns of each.
      steps: Steps in a turn.
      warmup: Steps of each before the first turn.
      unit: Of the work.
    """
    records = race(contenders, rounds=rounds, steps=steps, warmup=warmup)
    columns = ("", f"{unit}/s", f"of {records[-1].name}", "quartiles", "MiB", "loss")
    table = Table(*columns, title=f"{title}, {rounds} rounds")
    for record in records:
        loss = record.losses[-1]
        table.add_row(
            record.name,
            f"{record.rate(work):,.0f}",
            *ratios(records[-1].seconds, record.seconds),
            f"{record.peak_memory_bytes / 2**20:,.0f}",
            "" if loss is None else f"{loss:.3f}",
        )
    console = Console()
    console.print(table)
    for record in records:
        facts = (f"{name} {value}" for name, value in record.facts.items())
        console.print(f"{record.name}: {', '.join(facts)}")
    return records
