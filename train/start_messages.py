"""Messages and events at the start of a run: what trains, on what, and what differs from before."""

import dataclasses

import jax

from train.config.resolve import unavailable_backends
from train.reporter import Reporter
from train.resume import StartPoint
from train.run_setup import RunSetup
from train.runtime.accelerators import accelerator_warnings
from train.runtime.progress import ProgressBar
from train.telemetry.event_log import installed_versions
from train.warm_start.sources import WarmStart, WarmStartReport, explain_unread_source


def print_finished(setup: RunSetup, step: int, *, quiet: bool) -> None:
    """Print that the run has nothing left to do."""
    stopped_early = step < setup.experiment.steps
    reason = "evaluations stopped improving" if stopped_early else "as many as requested"
    bar = ProgressBar(step, quiet=quiet)
    bar.print(
        f"{setup.experiment.name} is finished: {step} steps are done ({reason}); in "
        f"{setup.folder.path}"
    )
    if unread := unread_source(setup):
        bar.print(unread)


def unread_source(setup: RunSetup) -> str:
    """Return why a resumed run does not start with the weights of `init_from`, if it is given."""
    return "" if setup.is_new_run else explain_unread_source(setup.folder, setup.source)


def log_skipped_checkpoints(setup: RunSetup, reporter: Reporter, start: StartPoint) -> None:
    """Log why training starts from this step: damaged checkpoints, or a rollback."""
    for step, reason in start.skipped_checkpoints:
        reporter.log_event("checkpoint skipped", step=step, reason=reason)
        reporter.print_message(f"checkpoint of step {step}: {reason}; skipped")
    setup.recovery.log_rollback(start.step, reporter)


def log_start(setup: RunSetup, reporter: Reporter, step: int) -> None:
    """Log from which step, with which changes and with which weights the run starts or resumes."""
    experiment, engine, folder = setup.experiment, setup.engine, setup.folder
    hardware = engine.model.hardware
    reporter.log_event(
        "resumed" if step else "started",
        step=step,
        new=setup.is_new_run,
        hardware=dataclasses.asdict(hardware),
        mesh=dict(engine.mesh.shape),
        versions=installed_versions(),
        changed={name: new for name, (_, new) in setup.changed_fields.items()},
        pinned={name: choice for name, (_, choice) in setup.pinned_fields.items()},
    )
    for warning in accelerator_warnings(hardware.platform):
        reporter.print_message(warning)
    for kernel, reason in hardware.broken_kernels:
        reporter.log_event("fell back", kernel=kernel, reason=reason)
        reporter.print_message(
            f"attention kernel {kernel}: cannot be compiled here ({reason}); using another. "
            "See python -m train doctor"
        )
    for name, choice in unavailable_backends(setup.auto_choices, experiment).items():
        reporter.log_event("fell back", setting=name, to=choice)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(engine.abstract_state().params))
    trained = "trainable " if experiment.lora.rank else ""
    verb = f"resumes from step {step}" if step else "starts"
    reporter.print_message(
        f"{experiment.name} {verb}: {num_parameters:,} {trained}parameters, "
        f"{setup.task.describe_training_data(setup.corpus)}, "
        f"{hardware.count} {hardware.kind or hardware.platform}; in {folder.path}"
    )
    for name, (old, new) in setup.changed_fields.items():
        reporter.print_message(f"{name} is {new} from now on (was {old})")
    for note in (*setup.unused_settings, *setup.corpus.notes, *setup.task.untrained_parts):
        reporter.print_message(note)
    if unread := unread_source(setup):
        reporter.print_message(unread)
    if setup.warm_start is not None and setup.warm_start_report is not None:
        log_warm_start(reporter, setup.warm_start, setup.warm_start_report)


def log_warm_start(reporter: Reporter, warm_start: WarmStart, report: WarmStartReport) -> None:
    """Log which weights a new run took from its source."""
    reporter.log_event(
        "warm start",
        source=warm_start.place,
        source_step=warm_start.step,
        only=warm_start.only,
        adapter=warm_start.adapter,
        **report.as_dict(),
    )
    if warm_start.adapter:
        reporter.print_message(f"starts with the adapter of {warm_start.adapter}")
    for line in report.lines(warm_start.source):
        reporter.print_message(line)
