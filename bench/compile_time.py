"""Compile time: of the training step by depth, and of the initial weights by compiler options.

    python -m bench.compile_time step [--layers 48 --against 12] [--rounds 3]
    python -m bench.compile_time initial-weights [--configs quickstart gpt2] [--rounds 3]

The step of `gpt2:xl` with scanned layers, at two depths of the same width, from tracing to
machine code, in turns; nothing is allocated. The unrolled step of the shallow model is also shown.

The program that draws initial weights runs once: with all of XLA's optimizations and with those of
`init_compiler_options`, in turns, the seconds of all cores to compile it and to run it.
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

from train.assembly import make_engine_on, make_task
from train.config.experiment_files import find_experiment
from train.experiment import Experiment
from train.parallel.mesh import make_mesh
from train.runtime.local_hardware import local_hardware
from transformer.model_context import unconstrained
from transformer.models.model import init_compiler_options
from transformer.models.stack import LayerLoop

VOCAB_SIZE = 8192
"""Of models whose vocabulary the data decide."""


def deepened(layers: int, loop: LayerLoop) -> Experiment:
    """Return `gpt2:xl` with `layers` layers and a batch of two windows."""
    xl = find_experiment("gpt2:xl")
    model = dataclasses.replace(xl.model, num_layers=layers, layer_loop=loop)
    return dataclasses.replace(xl, model=model, batch_size=2, grad_accum_steps=1)


def compile_seconds(experiment: Experiment) -> float:
    """Return the seconds to trace, lower and compile the training step."""
    jax.clear_caches()
    mesh = make_mesh(experiment.mesh)
    engine = make_engine_on(mesh, experiment, local_hardware())
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


def step(layers: int = 48, against: int = 12, rounds: int = 3) -> None:
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


def init_seconds(config: str, options: dict[str, Any] | None) -> tuple[float, float]:
    """Return processor seconds to compile the initial weights of a config, and to draw them."""
    model = make_task(find_experiment(config)).make_model(local_hardware(), unconstrained)
    if not model.config.vocab_size:
        model = model.clone(config=dataclasses.replace(model.config, vocab_size=VOCAB_SIZE))
    key = jax.random.key(0)
    lowered = jax.jit(model.init_params).lower(key)
    start = time.process_time()
    draw = lowered.compile(compiler_options=options)
    compiled = time.process_time()
    jax.block_until_ready(draw(key))
    return compiled - start, time.process_time() - compiled


def initial_weights(configs: tuple[str, ...] = ("quickstart", "gpt2"), rounds: int = 3) -> None:
    """Print processor seconds, and the ratio of their sums."""
    jax.config.update("jax_enable_compilation_cache", False)
    few = init_compiler_options("cpu")
    table = Table("config", "passes", "compile", "run", "ratio", title="initial weights, CPU")
    for config in configs:
        results = [(init_seconds(config, None), init_seconds(config, few)) for _ in range(rounds)]
        ratio = statistics.median(sum(one) / sum(other) for one, other in results)
        all_passes, few_passes = np.median(results, axis=0)  # each [compile, run]
        table.add_row(config, "all", *(f"{each:.1f}" for each in all_passes), "")
        table.add_row(config, "few", *(f"{each:.1f}" for each in few_passes), f"{ratio:.1f}")
    Console().print(table)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"step": step, "initial-weights": initial_weights})
