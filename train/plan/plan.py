"""The answer: what fits, how fast, and at what cost."""

import dataclasses
import functools
import math
from typing import Any

from train.choices import with_precision
from train.describe.shape import window
from train.experiment import Experiment
from train.plan.candidate import Candidate, sizes_of
from train.plan.compile_process import compile_apart
from train.plan.compiled import CompiledStep, compile_step
from train.plan.measured import step_seconds
from train.plan.precisions import InPrecision, alternatives
from train.plan.prices import price
from train.plan.published import Expected, as_dict, expected
from train.plan.quantities import Quantities
from train.plan.search import Ranked, ranked, search
from train.plan.target import Target, need_compiler

SHORT = 10.0
"""Seconds of a step, by the estimate, that is not run to be measured if it takes longer."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to plan."""

    search: bool = True
    """Try every mesh, rematerialisation and number of microbatches, and take the best; else the
    experiment as it is."""
    compile: int = 1
    """Compile the real step of at most so many of the best, until one fits; 0: estimates alone."""
    tokens: float = 0.0
    """To train on, for the time and the price; 0: as many as the experiment does."""
    prices: str = ""
    """A TOML file with the price of a chip and hour; empty: the list prices that are shipped."""
    precisions: bool = True
    """Estimate the best in each other precision too."""
    measure: bool = True
    """Run a few of the compiled steps, on devices that are here, where they fit and are short."""
    show: int = 8
    """Candidates of the ranking that are shown."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an experiment is best trained on a target."""

    experiment: Experiment
    """As it is to be trained."""
    target: Target
    chosen: Ranked
    compiled: CompiledStep | None
    others: tuple[Ranked, ...]
    """The ranking, best first; the experiment as it is, if nothing was searched."""
    tried: int
    """Candidates that were estimated."""
    refused: tuple[tuple[Ranked, CompiledStep], ...]
    """Better ones, by the estimates, that the compiler found too large."""
    measured: float | None
    """Seconds of the real step."""
    precisions: tuple[InPrecision, ...]
    """The best in each other precision, by the estimates."""
    tokens: float
    dollars_an_hour: float
    notes: tuple[str, ...] = ()

    @property
    def memory(self) -> int:
        """Bytes of one chip: as compiled, else as estimated."""
        return self.compiled.peak if self.compiled else self.chosen.footprint.total

    @property
    def fits(self) -> bool:
        available = self.target.memory
        return self.compiled.fits(available) if self.compiled else self.memory <= available

    @functools.cached_property
    def expected(self) -> Expected:
        """Time and MFU of a step as they are to be expected."""
        time = self.chosen.time
        return expected(self.target.chip, time.step, time.mfu, self.measured)

    @property
    def step_seconds_bound(self) -> float:
        """The least that a step can take: the roofline, or a step that was timed and is faster."""
        return min(self.chosen.time.step, self.expected.seconds)

    @property
    def mfu_bound(self) -> float:
        """MFU at `step_seconds_bound`."""
        return self.chosen.time.mfu * self.chosen.time.step / self.step_seconds_bound

    def tokens_per_second(self, step_seconds: float) -> float:
        """Return the throughput of all chips for a time of one step."""
        rows, length = window(self.experiment)
        return rows * length / step_seconds

    def hours(self, step_seconds: float) -> float:
        """Return the hours that all tokens take."""
        return self.tokens / self.tokens_per_second(step_seconds) / 3600

    def dollars(self, step_seconds: float) -> float:
        """Return what all tokens cost."""
        return self.hours(step_seconds) * self.dollars_an_hour * self.target.count

    def _by_time(self) -> dict[str, Any]:
        """Return what follows from the time of a step: as expected, and at the bound."""
        found: dict[str, Any] = {"expected_from": self.expected.why}
        steps = {"": self.expected.seconds, "_bound": self.step_seconds_bound}
        for suffix, step in steps.items():
            found[f"step_seconds{suffix}"] = step
            found[f"tokens_per_second{suffix}"] = self.tokens_per_second(step)
            found[f"hours{suffix}"] = self.hours(step)
            found[f"dollars{suffix}"] = self.dollars(step)
        return found | {
            "mfu": self.expected.mfu,
            "mfu_bound": self.mfu_bound,
            "published": as_dict(self.expected.published),
            "stand_in": as_dict(self.expected.stand_in),
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for `--json`."""
        time, size = self.chosen.time, self.chosen.footprint
        return {
            "target": self.target.name,
            "chips": self.target.count,
            "fits": self.fits,
            "mesh": sizes_of(self.chosen.candidate.mesh),
            "accumulate": self.chosen.candidate.accumulate,
            "remat": self.chosen.candidate.remat,
            "flags": self.chosen.candidate.flags(),
            "memory_bytes_per_chip": self.memory,
            "memory_bytes_available": self.target.memory,
            "estimated_bytes": dataclasses.asdict(size) | {"total": size.total},
            "compiled_bytes": _plain(self.compiled),
            **self._by_time(),
            "step_seconds_measured": self.measured,
            "step_seconds_overlapped": time.overlapped,
            "step_seconds_in_turn": time.in_turn,
            "compute_seconds": time.compute,
            "memory_seconds": time.memory,
            "link_seconds": time.links,
            "host_seconds": time.host,
            "tokens": self.tokens,
            "candidates": self.tried,
            "precision": self.experiment.model.precision.name,
            "precisions": {
                each.precision.name: each.as_dict(self.target.chip) for each in self.precisions
            },
            "notes": list(self.notes),
        }


def _plain(compiled: CompiledStep | None) -> dict[str, Any] | None:
    if compiled is None:
        return None
    return {
        field.name: getattr(compiled, field.name)
        for field in dataclasses.fields(compiled)
        if field.name not in ("collectives", "engine", "program")
    }


def plan(
    experiment: Experiment,
    target: Target,
    options: Options = Options(),
    notes: tuple[str, ...] = (),
) -> Plan:
    """Plans an experiment that has its sizes.

    Raises UsageError for a model that cannot be divided, UserError for a target whose compiler is
    not installed.
    """
    dollars_an_hour = price(target.chip, options.prices)  # before the search, which takes a while
    experiment = with_precision(experiment, target.hardware)
    if options.search and options.compile:
        need_compiler(target)  # before the search, which takes a while
    find = search if options.search else _as_it_is
    every = find(Quantities.of(experiment, target))
    refused = []
    chosen, compiled = every[0], None
    compiler = compile_step if target.here else compile_apart
    for each in every[: options.compile]:
        chosen, compiled = each, compiler(each.candidate.applied(experiment), target)
        if compiled.fits(target.memory):
            break
        refused.append((each, compiled))
    else:
        refused = refused[:-1]
    rows, length = window(experiment)
    planned = chosen.candidate.applied(experiment)
    return Plan(
        experiment=planned,
        target=target,
        chosen=chosen,
        compiled=compiled,
        others=tuple(every[: options.show]),
        tried=len(every),
        refused=tuple(refused),
        measured=measured(planned, chosen, compiled, target) if options.measure else None,
        precisions=tuple(alternatives(experiment, target, find)) if options.precisions else (),
        tokens=options.tokens or math.prod((experiment.steps, rows, length)),
        dollars_an_hour=dollars_an_hour,
        notes=notes,
    )


def _as_it_is(quantities: Quantities) -> list[Ranked]:
    """The experiment's own way and no other."""
    return [ranked(quantities, Candidate.of(quantities.experiment, quantities.target.count))]


def measured(
    experiment: Experiment, chosen: Ranked, compiled: CompiledStep | None, target: Target
) -> float | None:
    """Seconds of the real step, if it can be run here and is short."""
    if compiled is None or not target.here or not compiled.fits(target.memory):
        return None
    return step_seconds(experiment, compiled) if chosen.time.step < SHORT else None
