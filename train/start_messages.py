"""Messages and events at the start of a run: what trains, on what, and what differs from before."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from train.config.resolve import unavailable_backends
from train.engines.engine import Engine
from train.experiment import Experiment
from train.run_folder.folder import RunFolder
from train.runtime.accelerators import accelerator_warnings
from train.runtime.progress import ProgressBar
from train.telemetry.event_log import installed_versions
from train.telemetry.reporter import Reporter
from train.warm_start.sources import WarmStart, WarmStartReport

Changes = dict[str, tuple[Any, Any]]
"""Old and new value of settings, by name."""


def print_finished(
    experiment: Experiment, folder: RunFolder, step: int, *, note: str = "", quiet: bool
) -> None:
    """Print that the run has nothing left to do, and a note."""
    stopped_early = step < experiment.steps
    reason = "evaluations stopped improving" if stopped_early else "as many as requested"
    bar = ProgressBar(step, quiet=quiet)
    bar.print(f"{experiment.name} is finished: {step} steps are done ({reason}); in {folder.path}")
    if note:
        bar.print(note)


def log_start(
    reporter: Reporter,
    engine: Engine,
    experiment: Experiment,
    folder: RunFolder,
    step: int,
    *,
    auto_choices: Mapping[str, str],
    is_new_run: bool,
    training_data: str,
    notes: Sequence[str] = (),
    changed: Changes,
    pinned: Changes,
) -> None:
    """Log the start of the run, or from which step and with which changes it resumes.

    Args:
      reporter: Receives the event and the messages.
      engine: Engine of the run.
      experiment: Resolved settings.
      folder: Folder of the run.
      step: Step of the restored state; 0 at the start.
      auto_choices: What each `auto` setting became.
      training_data: Amount of training data, as text.
      is_new_run: True if the folder held no run.
      notes: Further messages, on the data and the task.
      changed: Settings that differ from those of the run so far.
      pinned: Settings that keep what `auto` was when the run began.
    """
    hardware = engine.model.hardware
    reporter.log_event(
        "resumed" if step else "started",
        step=step,
        new=is_new_run,
        hardware=dataclasses.asdict(hardware),
        mesh=dict(engine.mesh.shape),
        versions=installed_versions(),
        changed={name: new for name, (_, new) in changed.items()},
        pinned={name: choice for name, (_, choice) in pinned.items()},
    )
    for warning in accelerator_warnings(hardware.platform):
        reporter.print_message(warning)
    for kernel, reason in hardware.broken_kernels:
        reporter.log_event("fell back", kernel=kernel, reason=reason)
        reporter.print_message(
            f"attention kernel {kernel}: cannot be compiled here ({reason}); using another. "
            "See python -m train doctor"
        )
    for name, choice in unavailable_backends(auto_choices, experiment).items():
        reporter.log_event("fell back", setting=name, to=choice)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(engine.abstract_state().params))
    trained = "trainable " if experiment.lora.rank else ""
    verb = f"resumes from step {step}" if step else "starts"
    reporter.print_message(
        f"{experiment.name} {verb}: {num_parameters:,} {trained}parameters, {training_data}, "
        f"{hardware.count} {hardware.kind or hardware.platform}; in {folder.path}"
    )
    for name, (old, new) in changed.items():
        reporter.print_message(f"{name} is {new} from now on (was {old})")
    for note in notes:
        reporter.print_message(note)


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
