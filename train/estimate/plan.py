"""The answer: what fits, how fast, and at what cost."""

import dataclasses
import functools
import math
from typing import Any

from train.config.resolve import resolve_precision
from train.estimate.batch_shapes import max_batch_shape
from train.estimate.candidate import Candidate, mesh_sizes
from train.estimate.compile import CompiledStep, compile_step
from train.estimate.compile_process import compile_in_subprocess
from train.estimate.published import ExpectedStep, chip_price, expect_step, published_as_dict
from train.estimate.quantities import Quantities
from train.estimate.remedies import PrecisionOption, best_by_precision
from train.estimate.search import RankedCandidate, rank_candidate, search_candidates
from train.estimate.target import Target, require_compiler
from train.estimate.time_step import time_step
from train.experiment import Experiment

MAX_MEASURED_SECONDS = 10.0
"""Seconds of a step, by the estimate, that is not run to be measured if it takes longer."""


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """How to plan."""

    search: bool = True
    """Try every mesh, rematerialisation and number of microbatches, and take the best; else the
    experiment as it is."""
    compile_best: int = 1
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
    best: RankedCandidate
    compiled_step: CompiledStep | None
    ranking: tuple[RankedCandidate, ...]
    """The ranking, best first; the experiment as it is, if nothing was searched."""
    num_candidates: int
    """Candidates that were estimated."""
    rejected: tuple[tuple[RankedCandidate, CompiledStep], ...]
    """Better ones, by the estimates, that the compiler found too large."""
    measured_seconds: float | None
    """Seconds of the real step."""
    other_precisions: tuple[PrecisionOption, ...]
    """The best in each other precision, by the estimates."""
    tokens: float
    dollars_per_chip_hour: float
    notes: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Bytes of one chip: as compiled, else as estimated."""
        return self.compiled_step.peak if self.compiled_step else self.best.footprint.total

    @property
    def fits(self) -> bool:
        available = self.target.memory_bytes
        return (
            self.compiled_step.fits(available)
            if self.compiled_step
            else self.memory_bytes <= available
        )

    @functools.cached_property
    def expected(self) -> ExpectedStep:
        """Time and MFU of a step as they are to be expected."""
        time = self.best.time
        return expect_step(self.target.chip, time.step_seconds, time.mfu, self.measured_seconds)

    @property
    def step_seconds_bound(self) -> float:
        """The least that a step can take: the roofline, or a step that was timed and is faster."""
        return min(self.best.time.step_seconds, self.expected.seconds)

    @property
    def mfu_bound(self) -> float:
        """MFU at `step_seconds_bound`."""
        return self.best.time.mfu * self.best.time.step_seconds / self.step_seconds_bound

    def tokens_per_second(self, step_seconds: float) -> float:
        """Return the throughput of all chips for a time of one step."""
        rows, length = max_batch_shape(self.experiment)
        return rows * length / step_seconds

    def hours(self, step_seconds: float) -> float:
        """Return the hours that all tokens take."""
        return self.tokens / self.tokens_per_second(step_seconds) / 3600

    def dollars(self, step_seconds: float) -> float:
        """Return what all tokens cost."""
        return self.hours(step_seconds) * self.dollars_per_chip_hour * self.target.num_chips

    def _by_time(self) -> dict[str, Any]:
        """Return what follows from the time of a step: as expected, and at the bound."""
        found: dict[str, Any] = {"expected_from": self.expected.reason}
        steps = {"": self.expected.seconds, "_bound": self.step_seconds_bound}
        for suffix, step in steps.items():
            found[f"step_seconds{suffix}"] = step
            found[f"tokens_per_second{suffix}"] = self.tokens_per_second(step)
            found[f"hours{suffix}"] = self.hours(step)
            found[f"dollars{suffix}"] = self.dollars(step)
        return found | {
            "mfu": self.expected.mfu,
            "mfu_bound": self.mfu_bound,
            "published": published_as_dict(self.expected.published),
            "stand_in": published_as_dict(self.expected.fallback),
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for `--json`."""
        time, size = self.best.time, self.best.footprint
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
            "compiled_bytes": _plain(self.compiled_step),
            **self._by_time(),
            "step_seconds_measured": self.measured_seconds,
            "step_seconds_overlapped": time.overlapped_seconds,
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


def _plain(compiled: CompiledStep | None) -> dict[str, Any] | None:
    if compiled is None:
        return None
    return {
        field.name: getattr(compiled, field.name)
        for field in dataclasses.fields(compiled)
        if field.name not in ("collectives", "engine", "program")
    }


def make_plan(
    experiment: Experiment,
    target: Target,
    options: PlanOptions = PlanOptions(),
    notes: tuple[str, ...] = (),
) -> Plan:
    """Plans an experiment that has its sizes.

    Raises UsageError for a model that cannot be divided, UserError for a target whose compiler is
    not installed.
    """
    dollars_an_hour = chip_price(
        target.chip, options.prices
    )  # before the search, which takes a while
    experiment = resolve_precision(experiment, target.hardware)
    if options.search and options.compile_best:
        require_compiler(target)  # before the search, which takes a while
    find = search_candidates if options.search else _as_it_is
    every = find(Quantities.from_experiment(experiment, target))
    refused = []
    chosen, compiled = every[0], None
    compiler = compile_step if target.is_local else compile_in_subprocess
    for each in every[: options.compile_best]:
        chosen, compiled = each, compiler(each.candidate.apply_to(experiment), target)
        if compiled.fits(target.memory_bytes):
            break
        refused.append((each, compiled))
    else:
        refused = refused[:-1]
    rows, length = max_batch_shape(experiment)
    planned = chosen.candidate.apply_to(experiment)
    return Plan(
        experiment=planned,
        target=target,
        best=chosen,
        compiled_step=compiled,
        ranking=tuple(every[: options.show]),
        num_candidates=len(every),
        rejected=tuple(refused),
        measured_seconds=measure_if_local(planned, chosen, compiled, target)
        if options.measure
        else None,
        other_precisions=tuple(best_by_precision(experiment, target, find))
        if options.precisions
        else (),
        tokens=options.tokens or math.prod((experiment.steps, rows, length)),
        dollars_per_chip_hour=dollars_an_hour,
        notes=notes,
    )


def _as_it_is(quantities: Quantities) -> list[RankedCandidate]:
    """The experiment's own way and no other."""
    return [
        rank_candidate(
            quantities,
            Candidate.from_experiment(quantities.experiment, quantities.target.num_chips),
        )
    ]


def measure_if_local(
    experiment: Experiment, best: RankedCandidate, compiled: CompiledStep | None, target: Target
) -> float | None:
    """Seconds of the real step, if it can be run here and is short."""
    if compiled is None or not target.is_local or not compiled.fits(target.memory_bytes):
        return None
    return (
        time_step(experiment, compiled) if best.time.step_seconds < MAX_MEASURED_SECONDS else None
    )
