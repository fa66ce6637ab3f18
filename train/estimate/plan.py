"""Plan an experiment for a target: memory, time, price and the best mesh."""

import dataclasses
import functools
import math
from typing import Any

from train.config.resolve import resolve_precision
from train.estimate.batch_shapes import max_batch_shape
from train.estimate.candidate import Candidate, PlanOptions, mesh_sizes
from train.estimate.compile import CompiledStep, compile_step
from train.estimate.compile_process import compile_in_subprocess
from train.estimate.expected_time import ExpectedStep, chip_price, expect_step, published_as_dict
from train.estimate.local_measurements import time_step
from train.estimate.quantities import Quantities
from train.estimate.remedies import PrecisionOption, best_by_precision
from train.estimate.search import RankedCandidate, rank_candidate, search_candidates
from train.estimate.target import Target, require_compiler
from train.experiment import Experiment
from train.runtime.stages import stage

MAX_MEASURED_SECONDS = 10.0
"""Longest estimated step, in seconds, that is executed for a measurement."""


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

    def _time_as_dict(self) -> dict[str, Any]:
        """Return times, throughput and price, expected and at the bound."""
        result: dict[str, Any] = {"expected_from": self.expected.reason}
        steps = {"": self.expected.seconds, "_bound": self.step_seconds_bound}
        for suffix, step in steps.items():
            result[f"step_seconds{suffix}"] = step
            result[f"tokens_per_second{suffix}"] = self.tokens_per_second(step)
            result[f"hours{suffix}"] = self.hours(step)
            result[f"dollars{suffix}"] = self.dollars(step)
        return result | {
            "mfu": self.expected.mfu,
            "mfu_bound": self.mfu_bound,
            "published": published_as_dict(self.expected.published),
            "stand_in": published_as_dict(self.expected.fallback),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers for `--json`."""
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
            "compiled_bytes": _compiled_as_dict(self.compiled_step),
            **self._time_as_dict(),
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


def _compiled_as_dict(compiled: CompiledStep | None) -> dict[str, Any] | None:
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
    find = search_candidates if options.search else _unsearched
    ranked = find(Quantities.from_experiment(experiment, target))
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
    return Plan(
        experiment=planned,
        target=target,
        best=best,
        compiled_step=compiled,
        ranking=tuple(ranked[: options.show]),
        num_candidates=len(ranked),
        rejected=tuple(rejected),
        measured_seconds=measured,
        other_precisions=tuple(best_by_precision(experiment, target, find))
        if options.precisions
        else (),
        tokens=options.tokens or math.prod((experiment.steps, rows, length)),
        dollars_per_chip_hour=dollars_per_chip_hour,
        notes=notes,
    )


def _unsearched(quantities: Quantities) -> list[RankedCandidate]:
    """Return the experiment's own settings as the only candidate."""
    return [
        rank_candidate(
            quantities,
            Candidate.from_experiment(quantities.experiment, quantities.target.num_devices),
        )
    ]


def measure_if_local(
    experiment: Experiment, best: RankedCandidate, compiled: CompiledStep | None, target: Target
) -> float | None:
    """Return measured seconds of a step; None if it is not local, too large or too slow."""
    if compiled is None or not target.is_local or not compiled.fits(target.memory_bytes):
        return None
    return (
        time_step(experiment, compiled) if best.time.step_seconds < MAX_MEASURED_SECONDS else None
    )
