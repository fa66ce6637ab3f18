"""Compile time of the training step of a deep model, compared with a shallow one.

    python -m bench.compile_time [--layers 48 --against 12] [--rounds 3]

The step of `gpt2:xl` with scanned layers, at two depths of the same width, from tracing to
machine code, in turns; nothing is allocated. The unrolled step of the shallow model is also shown.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from train.config.experiment_files import find_experiment
from train.experiment import Experiment
from train.jit_engine import JitEngine
from train.parallel.mesh import make_mesh
from train.runtime.local_hardware import local_hardware
from transformer.config import LayerLoop


def deepened(layers: int, loop: LayerLoop) -> Experiment:
    """Return `gpt2:xl` with `layers` layers and a batch of two windows."""
    xl = find_experiment("gpt2:xl")
    model = dataclasses.replace(xl.model, num_layers=layers, layer_loop=loop)
    return dataclasses.replace(xl, model=model, batch_size=2, grad_accum_steps=1)


def compile_seconds(experiment: Experiment) -> float:
    """Return the seconds to trace, lower and compile the training step."""
    jax.clear_caches()
    engine = JitEngine(experiment, make_mesh(experiment.mesh), local_hardware())
    shape = (experiment.batch_size, experiment.sequence_length)
    batch: Any = {
        "tokens": jax.ShapeDtypeStruct(shape, np.int32),
        "targets": jax.ShapeDtypeStruct(shape, np.int32),
        "weights": jax.ShapeDtypeStruct(shape, np.float32),
        "examples": jax.ShapeDtypeStruct(shape[:1], np.uint32),
    }
    state = engine.abstract_state()
    start = time.perf_counter()
    engine.lower_step(state, batch).compile()
    return time.perf_counter() - start


def main(layers: int = 48, against: int = 12, rounds: int = 3) -> None:
    """Print seconds, and their ratio to those of the scanned shallow model."""
    jax.config.update("jax_enable_compilation_cache", False)
    cases: dict[tuple[int, LayerLoop], list[float]] = {
        (layers, "scan"): [],
        (against, "scan"): [],
        (against, "unroll"): [],
    }
    for _ in range(rounds):
        for (depth, loop), seconds in cases.items():
            seconds.append(compile_seconds(deepened(depth, loop)))
    base = cases[against, "scan"]
    table = Table("layers", "loop", "seconds", "ratio", title="compiling the gpt2:xl step")
    for (depth, loop), seconds in cases.items():
        ratio = statistics.median(s / b for s, b in zip(seconds, base, strict=True))
        table.add_row(str(depth), loop, f"{statistics.median(seconds):.1f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
