"""Side-by-side measurement: contenders take turns in shuffled order and are compared by round.

On a shared machine, times taken at different moments are not comparable. Turns of a few steps
expose every contender to the same load, and the ratio within a round cancels it.
"""

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, quantiles

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from bench.contender import Contender, Record, Runner, running
from train.errors import UserError


def race(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    steps: int,
    warmup: int,
    seed: int = 0,
    build_together: bool = False,
) -> list[Record]:
    """Build the contenders, then run ``steps`` steps of each in every round.

    Args:
      contenders: The sides.
      rounds: Number of turns of each.
      steps: Steps in a turn.
      warmup: Steps of each before the first turn.
      seed: Seed of the order of turns.
      build_together: Build all at once, in place of one after the other: shorter where cores and
        memory suffice for it.

    Raises UserError if a contender cannot be started or ends early.
    """
    if rounds < 1 or steps < 1 or warmup < 1:
        raise UserError(
            f"rounds {rounds}, steps {steps}, warmup {warmup}: too few; give at least 1 of each"
        )
    shuffled = random.Random(seed).sample
    with ExitStack() as stack, Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=rounds * len(contenders))
        runners: list[Runner] = []
        for contender in contenders:
            runners.append(stack.enter_context(running(contender, warmup)))
            if not build_together:
                _wait_for(runners[-1:], progress, task)
        if build_together:
            _wait_for(runners, progress, task)
        for _ in range(rounds):
            for runner in shuffled(runners, len(runners)):
                progress.update(task, description=runner.name)
                runner.turn(steps)
                progress.advance(task)
        return [runner.finish() for runner in runners]


def _wait_for(runners: Sequence[Runner], progress: Progress, task: TaskID) -> None:
    for runner in runners:
        progress.update(task, description=f"building {runner.name}")
        runner.wait_until_ready()


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
    return [_row(record, base, work) for record in records]


def _row(record: Record, base: Sequence[float], work: float) -> Row:
    rates = [work / seconds for seconds in record.seconds]
    ratio, quartiles = spread([b / s for b, s in zip(base, record.seconds, strict=True)])
    shares = [share for share in record.others if share is not None]
    return Row(record, median(rates), ratio, quartiles, median(shares) if shares else None)


def spread(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median and quartiles of the values; a single value stands for all three."""
    if len(values) == 1:  # before Python 3.13, quantiles needs two values
        return values[0], (values[0], values[0])
    first, middle, third = quantiles(values, n=4, method="inclusive")
    return middle, (first, third)


def table(title: str, rows: Sequence[Row], reference: str, unit: str) -> Table:
    """Return the comparison as a table; ``unit`` is the unit of work, for example "tokens".

    "others" is the fraction of the cores that other processes used meanwhile, "ready in" the
    seconds
    for building and warming up.
    """
    shown = Table(title=title, caption="\n".join(_made_of(row.record) for row in rows))
    shown.add_column("")
    for heading in (
        f"{unit}/s",
        f"of {reference}",
        "quartiles",
        "others",
        "MiB",
        "ready in",
        "loss",
    ):
        shown.add_column(heading, justify="right")
    for row in rows:
        shown.add_row(*_cells(row))
    return shown


def _cells(row: Row) -> list[str]:
    first, third = row.ratio_quartiles
    loss = row.record.losses[-1]
    return [
        row.record.name,
        f"{row.rate:,.0f}",
        f"{row.ratio:.2f}",
        f"{first:.2f}-{third:.2f}",
        "" if row.others is None else f"{row.others:.0%}",
        f"{row.record.peak_memory_bytes / 2**20:,.0f}",
        f"{row.record.build_seconds:.1f} s",
        "" if loss is None else f"{loss:.3f}",
    ]


def _made_of(record: Record) -> str:
    versions = [f"{name} {version}" for name, version in record.versions.items()]
    facts = [
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in record.facts.items()
    ]
    return f"{record.name}: {', '.join(versions + facts)}"
