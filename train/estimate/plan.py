"""Plan an experiment for a target: memory, time, price and the best mesh."""

import dataclasses
import functools
import importlib.resources
import math
import tomllib
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType

from train.config.resolve import resolve_precision
from train.errors import UserError, as_damaged, as_user_error
from train.estimate.batch_shapes import max_batch_shape
from train.estimate.chips import Chip
from train.estimate.compile import CompiledStep, compile_in_subprocess, compile_step, time_step
from train.estimate.quantities import Quantities, mesh_sizes
from train.estimate.remedies import PrecisionOption, narrower_precisions, options_in_precision
from train.estimate.roofline import ExpectedStep, expect_step
from train.estimate.search import RankedCandidate, own_candidate, search_candidates
from train.estimate.tables import format_bytes, format_count, memory_table, new_table
from train.estimate.target import Target, require_compiler
from train.experiment import Experiment
from train.files import expand_path
from train.runtime.stages import stage
from train.runtime.startup import program_name
from train.telemetry.goodput import format_duration
from transformer.validation import NonNegativeFloat, NonNegativeInt

MAX_MEASURED_SECONDS = 10.0
"""Longest estimated step, in seconds, that is executed for a measurement."""


SHOWN_CANDIDATES = 8
"""Rows of the ranking that are printed."""


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of a plan. Also flags of the verb `plan`, whose help shows the texts below."""

    search: bool = True
    """Search over meshes, rematerialization and microbatches; False: keep the experiment's
    settings."""
    compile_best: NonNegativeInt = 3
    """Compile up to this many of the best candidates, until one fits; 0: estimates only."""
    precisions: bool = True
    """Estimate the best candidate in each narrower precision too; precision changes training
    results."""
    measure: bool = True
    """With --target here, execute a few steps if they fit and are short."""
    tokens: NonNegativeFloat = 0.0
    """Training tokens for total time and price; 0: those of the experiment's steps."""
    prices: str = ""
    """TOML file with prices per chip hour; empty: the shipped list prices."""


def chip_price(chip: Chip, path: str = "") -> float:
    """Return US dollars per chip hour, from the user's table or the shipped one.

    Raises UserError if the file cannot be read or has no price for the chip.
    """
    price = load_prices(path).get(chip.name)
    if not isinstance(price, int | float) or not 0 <= price < math.inf:
        raise UserError(
            f"prices {path or 'the table of prices'}: has no price for {chip.name}; add a line "
            f"like {chip.name} = 1.20"
        )
    return float(price)


def load_prices(path: str = "") -> dict[str, Any]:
    """Return a price table, the shipped one without a path.

    Raises UserError if the file cannot be read or is not TOML.
    """
    if not path:
        shipped = importlib.resources.files("train.estimate") / "prices.toml"
        return tomllib.loads(shipped.read_text())
    with as_user_error(path):
        data = expand_path(path).read_bytes()
    with as_damaged(f"prices {path}", "TOML", "write lines like v5e = 1.20"):
        return tomllib.loads(data.decode())


@dataclasses.dataclass(frozen=True)
class Plan:
    """Best way to train an experiment on a target."""

    experiment: Experiment
    """The experiment with the planned settings."""
    target: Target
    best: RankedCandidate
    compiled_step: CompiledStep | None
    ranking: tuple[RankedCandidate, ...]
    """Candidates, best first; only the experiment's own settings without a search."""
    num_candidates: int
    """Candidates that were estimated."""
    rejected: tuple[tuple[RankedCandidate, CompiledStep], ...]
    """Higher-ranked candidates that do not fit once compiled."""
    measured_seconds: float | None
    """Measured seconds of a step; None if it was not executed."""
    other_precisions: tuple[PrecisionOption, ...]
    """Best candidate in each narrower precision, by the estimates."""
    tokens: float
    dollars_per_chip_hour: float
    notes: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Return bytes of one chip: compiled if available, else estimated."""
        return self.compiled_step.peak if self.compiled_step else self.best.memory.total

    @property
    def fits(self) -> bool:
        if self.compiled_step:
            return self.compiled_step.fits(self.target.memory_bytes)
        return self.memory_bytes <= self.target.memory_bytes

    @functools.cached_property
    def expected(self) -> ExpectedStep:
        """Return the expected time and MFU of a step."""
        time = self.best.time
        return expect_step(self.target.chip, time.step_seconds, time.mfu, self.measured_seconds)

    @property
    def step_seconds_bound(self) -> float:
        """Return the lower bound of the step time: the roofline, or a faster measurement."""
        return min(self.best.time.step_seconds, self.expected.seconds)

    @property
    def mfu_bound(self) -> float:
        """Return the MFU at `step_seconds_bound`."""
        return self.best.time.mfu * self.best.time.step_seconds / self.step_seconds_bound

    def tokens_per_second(self, step_seconds: float) -> float:
        """Return the throughput of all chips for a step time."""
        rows, length = max_batch_shape(self.experiment)
        return rows * length / step_seconds

    def hours(self, step_seconds: float) -> float:
        """Return the hours to train on all tokens."""
        return self.tokens / self.tokens_per_second(step_seconds) / 3600

    def dollars(self, step_seconds: float) -> float:
        """Return the price of training on all tokens."""
        return self.hours(step_seconds) * self.dollars_per_chip_hour * self.target.num_chips

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for `--json`."""
        time, size, published = self.best.time, self.best.memory, self.expected.published
        return {
            "target": self.target.name,
            "chips": self.target.num_chips,
            "fits": self.fits,
            "mesh": mesh_sizes(self.best.candidate.mesh),
            "grad_accum_steps": self.best.candidate.grad_accum_steps,
            "remat": self.best.candidate.remat,
            "flags": self.best.candidate.flags(),
            "memory_bytes_per_chip": self.memory_bytes,
            "memory_bytes_available": self.target.memory_bytes,
            "estimated_bytes": dataclasses.asdict(size) | {"total": size.total},
            "compiled_bytes": self.compiled_step and self.compiled_step.as_dict(),
            **self._costs("", self.expected.seconds),
            **self._costs("_bound", self.step_seconds_bound),
            "mfu": self.expected.mfu,
            "mfu_bound": self.mfu_bound,
            "expected_from": self.expected.reason,
            "published": published and published.as_dict(),
            "step_seconds_measured": self.measured_seconds,
            "step_seconds_in_turn": time.sequential_seconds,
            "compute_seconds": time.compute_seconds,
            "memory_seconds": time.memory_seconds,
            "link_seconds": time.link_seconds,
            "host_seconds": time.host_seconds,
            "tokens": self.tokens,
            "candidates": self.num_candidates,
            "precision": self.experiment.model.precision.name,
            "precisions": {
                each.precision.name: each.as_dict(self.target.chip)
                for each in self.other_precisions
            },
            "notes": list(self.notes),
        }

    def _costs(self, suffix: str, step_seconds: float) -> dict[str, float]:
        """Return time, throughput and price of a step time, for `--json`."""
        return {
            f"step_seconds{suffix}": step_seconds,
            f"tokens_per_second{suffix}": self.tokens_per_second(step_seconds),
            f"hours{suffix}": self.hours(step_seconds),
            f"dollars{suffix}": self.dollars(step_seconds),
        }


def make_plan(
    experiment: Experiment,
    target: Target,
    options: PlanOptions,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Plan an experiment whose sizes are resolved.

    Raises:
      UsageError: No mesh divides the model.
      UserError: The target's compiler is not installed, or a price is missing.
    """
    # Errors in the request are reported before the search, which takes a while.
    dollars_per_chip_hour = chip_price(target.chip, options.prices)
    experiment = resolve_precision(experiment, target.hardware)
    if options.search and options.compile_best:
        require_compiler(target)
    find = search_candidates if options.search else own_candidate
    ranked = find(Quantities(experiment, target.hardware), target)
    rejected = []
    best, compiled = ranked[0], None
    compiler = compile_step if target.is_local else compile_in_subprocess
    for number, each in enumerate(ranked[: options.compile_best], start=1):
        best = each
        with stage(f"compiling candidate {number} for {target.name}"):
            compiled = compiler(each.candidate.apply_to(experiment), target)
        if compiled.fits(target.memory_bytes):
            break
        rejected.append((each, compiled))
    else:
        rejected = rejected[:-1]  # none fits: `best` itself is the last one
    rows, length = max_batch_shape(experiment)
    planned, measured = best.candidate.apply_to(experiment), None
    if options.measure:
        with stage("measuring the step"):
            measured = measure_if_local(planned, best, compiled, target)
    others = []
    if options.precisions:
        for precision in narrower_precisions(experiment.model.precision, target.chip):
            others.append(options_in_precision(experiment, precision, target, find)[0])
    return Plan(
        experiment=planned,
        target=target,
        best=best,
        compiled_step=compiled,
        ranking=tuple(ranked[:SHOWN_CANDIDATES]),
        num_candidates=len(ranked),
        rejected=tuple(rejected),
        measured_seconds=measured,
        other_precisions=tuple(others),
        tokens=options.tokens or math.prod((experiment.steps, rows, length)),
        dollars_per_chip_hour=dollars_per_chip_hour,
        notes=notes,
    )


def measure_if_local(
    experiment: Experiment, best: RankedCandidate, compiled: CompiledStep | None, target: Target
) -> float | None:
    """Return measured seconds of a step; None if it is not local, too large or too slow."""
    if compiled is None or not target.is_local or not compiled.fits(target.memory_bytes):
        return None
    if best.time.step_seconds >= MAX_MEASURED_SECONDS:
        return None
    return time_step(experiment, compiled)


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the verdict, then memory, time and alternatives."""
    console = console or Console(highlight=False)
    for part in (_verdict, _memory, _time, _ranking, _precisions):
        for line in part(plan):
            console.print(line, soft_wrap=isinstance(line, str))  # flags are pasted
    for note in plan.notes:
        console.print(f"Note: {note}.")


def _verdict(plan: Plan) -> Iterable[RenderableType]:
    target, expected, bound = plan.target, plan.expected, plan.step_seconds_bound
    spare = target.memory_bytes - plan.memory_bytes
    verdict = "fits" if plan.fits else "does not fit"
    unit = "chip" if target.num_devices == target.num_chips else "device, two of a chip,"
    room = f"{format_bytes(abs(spare))} per {unit} {'free' if spare >= 0 else 'over the limit'}"
    source = "compiled" if plan.compiled_step else "estimated"
    yield (
        f"[bold]{plan.experiment.name} on {target.name}[/bold] ({target.num_chips} x "
        f"{target.chip.device_kind}): [bold]{verdict}[/bold], {format_bytes(plan.memory_bytes)} of "
        f"{format_bytes(target.memory_bytes)} ({source}), {room}"
    )
    yield (
        f"expected: {_seconds(expected.seconds)} per step, "
        f"{format_count(plan.tokens_per_second(expected.seconds))} tokens/s, MFU "
        f"{expected.mfu:.0%} ({expected.reason})"
    )
    yield (
        f"at most: {_seconds(bound)} per step, {format_count(plan.tokens_per_second(bound))} "
        f"tokens/s, MFU {plan.mfu_bound:.0%}, if only arithmetic, memory and links took time"
    )
    if run := expected.published:
        yield f"best published: MFU {run.mfu:.1%} for {run.run}, {run.url}"
    least, likely = (format_duration(3600 * plan.hours(each)) for each in (bound, expected.seconds))
    yield (
        f"{format_count(plan.tokens)} tokens in {least} to {likely}, for "
        f"{_dollars(plan.dollars(bound))} to {_dollars(plan.dollars(expected.seconds))} "
        f"(${plan.dollars_per_chip_hour:.2f} per chip hour)"
    )
    yield f"{program_name()} fit ... {plan.best.candidate.flags()}\n"


def _memory(plan: Plan) -> Iterable[RenderableType]:
    compiled = plan.compiled_step
    yield memory_table("Memory of one chip", plan.best.memory, compiled)
    if compiled and compiled.rejection:
        yield f"The compiler rejects the step; sizes are lower bounds: {compiled.rejection}"
    if compiled:
        yield f"[dim]Compiled in {compiled.compile_seconds:.0f} s.[/dim]"


def _time(plan: Plan) -> Iterable[RenderableType]:
    time = plan.best.time
    table = new_table("Time of one step", "what", "seconds")
    table.add_row("compute", _seconds(time.compute_seconds))
    table.add_row("memory", _seconds(time.memory_seconds))
    for axis, seconds in time.link_seconds.items():
        table.add_row(f"links, {axis}", _seconds(seconds))
    for what, seconds in time.host_seconds.items():
        table.add_row(f"host, {what}", _seconds(seconds))
    table.add_row("step, at least", _seconds(time.step_seconds), style="bold")
    origin = "expected" if plan.measured_seconds is None else "measured"
    table.add_row(f"step, {origin}", _seconds(plan.expected.seconds), style="bold")
    table.add_row("nothing overlapped", _seconds(time.sequential_seconds))
    yield table


def _ranking(plan: Plan) -> Iterable[RenderableType]:
    if plan.num_candidates < 2:
        return
    table = new_table(
        f"Best of {plan.num_candidates:,} candidates, by the estimates",
        "mesh",
        "remat",
        "microbatches",
        "memory",
        "step, at least",
        "MFU, at most",
    )
    for each in plan.ranking:
        table.add_row(
            each.candidate.mesh_text(),
            each.candidate.remat,
            str(each.candidate.grad_accum_steps),
            format_bytes(each.memory.total),
            _seconds(each.time.step_seconds),
            f"{each.time.mfu:.0%}",
            style="bold" if each is plan.best else (None if each.fits else "dim"),
        )
    yield table
    for each, compiled_step in plan.rejected:
        yield (
            f"{each.candidate.mesh_text()}, {each.candidate.remat}: estimated "
            f"{format_bytes(each.memory.total)}, needs {format_bytes(compiled_step.peak)} "
            f"{'or more: the compiler rejects it' if compiled_step.rejection else 'as compiled'}"
        )


def _precisions(plan: Plan) -> Iterable[RenderableType]:
    if not plan.other_precisions:
        return
    table = new_table(
        "Other precisions, which change training results",
        *("precision", "memory", "step, at least", "MFU, at most", "fits"),
    )
    own = PrecisionOption(plan.experiment.model.precision, plan.best)
    for each in (own, *plan.other_precisions):
        best = each.best
        table.add_row(
            each.precision.name,
            format_bytes(best.memory.total),
            _seconds(best.time.step_seconds),
            f"{best.time.mfu:.0%}",
            "yes" if best.fits else "no",
            style="bold" if each is own else None,
        )
    yield table
    for each in plan.other_precisions:
        yield f"{each.precision.name}: {program_name()} fit ... {each.flags()}"


def _dollars(dollars: float) -> str:
    return f"${dollars:,.{0 if dollars >= 10 else 2}f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
