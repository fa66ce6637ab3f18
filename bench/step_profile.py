"""Training step of a config on random tokens, by kernel, as JAX's profiler sees it.

    python -m bench.step_profile transformer_base [--rows 32] [--steps 3]

Kernels are grouped by name without their numbers. On a GPU the times are those of the device; on a
CPU those of the threads that run the program, without what is nested in a kernel.
"""

import re
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.machine import machine
from bench.softmax_profile import Span, alone
from train.assembly import make_engine
from train.config.experiment_files import find_experiment
from train.config.resolve import resolve_precision
from train.estimate.batch_shapes import resolve_sizes, unsharded_batch_shapes
from train.runtime.local_hardware import local_hardware


@dataclass(frozen=True)
class Options:
    """Profile the training step of a config."""

    config: Annotated[str, tyro.conf.Positional]
    rows: int = 0
    """Rows of a batch; 0: those of the config."""
    vocabulary: int = 32_000
    steps: int = 3
    """Steps under the profiler; as many run before."""
    shown: int = 20
    """Kernels in the table."""


def random_batch(shapes: dict[str, jax.ShapeDtypeStruct], vocabulary: int) -> dict[str, np.ndarray]:
    """Return tokens and targets at random, and everything else as in rows without padding."""
    drawn = np.random.default_rng(0)

    def values(name: str, leaf: jax.ShapeDtypeStruct) -> Any:
        if name in ("tokens", "targets", "source"):
            return drawn.integers(vocabulary, size=leaf.shape)
        if name.endswith("positions"):
            return np.broadcast_to(np.arange(leaf.shape[-1]), leaf.shape)
        return np.arange(leaf.shape[0]) if name == "examples" else np.ones(leaf.shape)

    return {name: values(name, leaf).astype(leaf.dtype) for name, leaf in shapes.items()}


def kernel_nanoseconds(folder: str) -> Counter[str]:
    """Return nanoseconds by kernel in a profile."""
    [path] = Path(folder).rglob("*.xplane.pb")
    total: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            if line.name.startswith("Stream") or "XLAEigen" in line.name:
                spans = [Span(e.name, round(e.start_ns), round(e.end_ns)) for e in line.events]
                for name, nanoseconds in alone(spans).items():
                    total[re.sub(r"[.\d_]+$", "", name)] += nanoseconds
    return total


def main(options: Options) -> None:
    """Time and profile the step, and print its largest kernels."""
    hardware, console = local_hardware(), Console()
    experiment = resolve_precision(find_experiment(options.config), hardware)
    if experiment.data.tokenizer is not None:
        model = replace(experiment.model, vocab_size=options.vocabulary)
        experiment = replace(experiment, model=model)
    experiment, _ = resolve_sizes(experiment)
    engine = make_engine(experiment, hardware)
    rows = options.rows or experiment.batch_size
    shapes = unsharded_batch_shapes(experiment, rows)
    batch = engine.put_batch(random_batch(shapes, options.vocabulary))
    state = engine.init()

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(options.steps):
            state, _ = engine.step(state, batch)
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / options.steps

    run()
    seconds = run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        kernels = kernel_nanoseconds(folder)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    title = f"{options.config}, {rows} rows: {seconds * 1e3:.1f} ms a step without the profiler"
    grid = Table(title=title)
    for heading in ("kernel", "ms a step", "of all"):
        grid.add_column(heading)
    for name, nanoseconds in kernels.most_common(options.shown):
        milliseconds = nanoseconds / 1e6 / options.steps
        grid.add_row(name, f"{milliseconds:.2f}", f"{nanoseconds / kernels.total():.0%}")
    console.print(grid)


if __name__ == "__main__":
    main(tyro.cli(Options))
