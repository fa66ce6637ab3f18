"""Step time estimated by a plan, compared with the real step on the local devices.

    python -m bench plan_time [--clock cores]

Each case is planned as it is, compiled, and run on random tokens; the drill prints both times and
the terms of the estimate, then the median and the worst error. Nothing is read: vocabularies are
given.
"""

import statistics
import time
from typing import Literal

import jax
from rich.console import Console
from rich.table import Table

from train.cli.config_verbs import ConfigArguments
from train.cli.parsing import parse
from train.config.experiment_files import find_experiment
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.compile import compile_step, time_step
from train.estimate.quantities import Candidate, Quantities
from train.estimate.roofline import StepTime, estimate_step_time
from train.estimate.target import Clock, Target, local_target
from train.experiment import Experiment

TOY = "gpt2:small --model.precision float32 --grad-accum-steps 1 --model.vocab-size 2048"

SMALL = (
    "quickstart --model.vocab-size 2048",
    "shakespeare_char_cpu --model.vocab-size 65",
    "bert_tiny --model.vocab-size 8192 --batch-size 16",
    "multi30k --model.vocab-size 8000 --data.batch-tokens 1024",
    f"{TOY} --model.d-model 192 --model.num-layers 2 --batch-size 1",
    f"{TOY} --model.d-model 192 --model.num-layers 2 --batch-size 16 --data.sequence-length 64",
    f"{TOY} --model.d-model 768 --model.num-layers 1 --batch-size 4 --data.sequence-length 128",
)
"""For processors, of a second a step."""

LARGE = (
    "gpt2:small --batch-size 16 --grad-accum-steps 1",
    "gpt2:small --batch-size 16 --grad-accum-steps 1 --model.remat full",
    "gpt2:small --batch-size 16 --grad-accum-steps 4",
    "gpt2:medium --batch-size 16 --grad-accum-steps 1 --model.remat full",
    "gpt2:small --batch-size 16 --grad-accum-steps 1 --model.precision float32",
    "bert:base --batch-size 64 --grad-accum-steps 1",
    "transformer_base --grad-accum-steps 1",
    "llama:3.2-1b --batch-size 8 --grad-accum-steps 1 --model.remat full",
)
"""For accelerators, one or several."""

STEPS = 5
"""Timed steps of each case."""

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cores": time.process_time}


def drill(clock: Literal["wall", "cores"] = "wall") -> None:
    """Print a table.

    Args:
      clock: "cores" counts the seconds of this process's cores, on a machine that is shared. Give
        it one core (taskset -c 0), or waiting for the others counts too.
    """
    target = local_target(CLOCKS[clock])
    table = Table("case", "matmuls", "memory", "estimated", "measured", "ratio", box=None)
    ratios = []
    for case in SMALL if target.chip.platform == "cpu" else LARGE:
        estimate, measured = compared(case, target, CLOCKS[clock])
        ratios.append(estimate.step_seconds / measured)
        times = (estimate.compute_seconds, estimate.memory_seconds, estimate.step_seconds, measured)
        table.add_row(case, *(f"{each * 1e3:.1f} ms" for each in times), f"{ratios[-1]:.2f}")
    console = Console(width=200)
    console.print(f"{target.num_chips} x {target.chip.device_kind}, JAX {jax.__version__}")
    console.print(table)
    errors = [max(each, 1 / each) - 1 for each in ratios]
    median, worst = statistics.median(errors), max(errors)
    console.print(f"error (the larger over the smaller): median {median:.0%}, worst {worst:.0%}")


def settings_of(case: str) -> tuple[Experiment, tuple[str, ...]]:
    """Return the experiment of a case, and the assumptions about its sizes."""
    config, *settings = case.split()
    base = find_experiment(config)
    given = parse(ConfigArguments, settings, verb="plan", experiment=base)
    return resolve_sizes(given.experiment)


def compared(case: str, target: Target, clock: Clock) -> tuple[StepTime, float]:
    """Return the estimate of a case, and the measured seconds of a step."""
    experiment, _ = settings_of(case)
    candidate = Candidate.from_experiment(experiment, target.num_devices)
    estimate = estimate_step_time(Quantities(experiment, target.hardware), candidate, target)
    compiled = compile_step(experiment, target)
    return estimate, time_step(experiment, compiled, STEPS, clock)
