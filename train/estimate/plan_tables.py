"""Print a plan as tables for people."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from train.estimate.description_tables import format_bytes, format_count, new_table
from train.estimate.hlo import total_collectives
from train.estimate.plan import Plan
from train.estimate.remedies import PrecisionOption
from train.runtime.startup import program_name

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def print_plan(plan: Plan, console: "Console | None" = None) -> None:
    """Print the verdict, then memory, time, communication and alternatives."""
    from rich.console import Console

    console = console or Console(highlight=False)
    for line in (
        *_verdict(plan),
        *_memory(plan),
        *_time(plan),
        *_collectives(plan),
        *_ranking(plan),
        *_precisions(plan),
    ):
        console.print(line, soft_wrap=isinstance(line, str))  # flags are pasted
    for note in plan.notes:
        console.print(f"Note: {note}.")


def _verdict(plan: Plan) -> Iterable["RenderableType"]:
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
    if expected.published is not None:
        yield f"best published: MFU {expected.published.citation()}, {expected.published.url}"
    if expected.fallback is not None:
        yield f"from another chip: MFU {expected.fallback.citation()}, {expected.fallback.url}"
    yield (
        f"{format_count(plan.tokens)} tokens in {format_duration(plan.hours(bound))} to "
        f"{format_duration(plan.hours(expected.seconds))}, for {_dollars(plan.dollars(bound))} to "
        f"{_dollars(plan.dollars(expected.seconds))} "
        f"(${plan.dollars_per_chip_hour:.2f} per chip hour)"
    )
    yield f"{program_name()} fit ... {plan.best.candidate.flags()}\n"


def _memory(plan: Plan) -> Iterable["RenderableType"]:
    size, real = plan.best.footprint, plan.compiled_step
    table = new_table("Memory of one chip", "what", "estimated", "compiled")
    rows: dict[str, tuple[int, int | None]] = {
        "weights": (size.weights, real.weights if real else None),
        "optimizer": (size.optimizer, real.optimizer if real else None),
        "other state": (size.other_state, real.other_state if real else None),
        "batch": (size.batch, real.batch if real else None),
        "gradients": (size.gradients, None),
        "residuals": (size.residuals, None),
        "working set of a layer or the loss": (size.working_set, None),
        "temporaries": (size.temporaries, real.temporaries if real else None),
        # Without an estimate: nearly all outputs take the memory of donated arguments.
        "outputs and program": (0, real.peak - real.arguments - real.temporaries if real else None),
        "all": (size.total, real.peak if real else None),
    }
    for name, (estimate, compiled_bytes) in rows.items():
        style = "bold" if name in ("all", "temporaries") else None
        table.add_row(
            name,
            format_bytes(estimate),
            "" if compiled_bytes is None else format_bytes(compiled_bytes),
            style=style,
        )
    yield table
    if real and real.rejection:
        yield f"The compiler rejects the step; sizes are lower bounds: {real.rejection}"


def _time(plan: Plan) -> Iterable["RenderableType"]:
    time = plan.best.time
    table = new_table("Time of one step", "what", "seconds")
    table.add_row("compute", _seconds(time.compute_seconds))
    table.add_row("memory", _seconds(time.memory_seconds))
    for axis, seconds in time.link_seconds.items():
        table.add_row(f"links, {axis}", _seconds(seconds))
    for what, seconds in time.host_seconds.items():
        table.add_row(f"host, {what}", _seconds(seconds))
    table.add_row("step, at least", _seconds(time.step_seconds), style="bold")
    if plan.measured_seconds is None:
        table.add_row("step, expected", _seconds(plan.expected.seconds), style="bold")
    else:
        table.add_row("step, measured", _seconds(plan.measured_seconds), style="bold")
    table.add_row("everything overlapped", _seconds(time.overlapped_seconds))
    table.add_row("nothing overlapped", _seconds(time.sequential_seconds))
    yield table


def _collectives(plan: Plan) -> Iterable["RenderableType"]:
    if plan.compiled_step is None or not plan.compiled_step.collectives:
        return
    table = new_table(
        "Communication of one step, as compiled", "collective", "along", "times", "bytes"
    )
    for (kind, axes), (count, size) in sorted(
        total_collectives(plan.compiled_step.collectives).items()
    ):
        table.add_row(kind, ", ".join(axes), f"{count:,}", format_bytes(size))
    yield table
    yield f"[dim]Compiled in {plan.compiled_step.compile_seconds:.0f} s.[/dim]"


def _ranking(plan: Plan) -> Iterable["RenderableType"]:
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
            format_bytes(each.footprint.total),
            _seconds(each.time.step_seconds),
            f"{each.time.mfu:.0%}",
            style="bold" if each is plan.best else (None if each.fits else "dim"),
        )
    yield table
    for each, compiled_step in plan.rejected:
        yield (
            f"{each.candidate.mesh_text()}, {each.candidate.remat}: estimated "
            f"{format_bytes(each.footprint.total)}, needs {format_bytes(compiled_step.peak)} "
            f"{'or more: the compiler rejects it' if compiled_step.rejection else 'as compiled'}"
        )


def _precisions(plan: Plan) -> Iterable["RenderableType"]:
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
            format_bytes(best.footprint.total),
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


def format_duration(hours: float) -> str:
    """Format hours in seconds, minutes, hours or days."""
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} seconds"
    if hours < 1:
        return f"{hours * 60:.0f} minutes"
    return f"{hours:,.1f} hours" if hours < 48 else f"{hours / 24:,.0f} days"
