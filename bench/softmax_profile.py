"""Profile of blockwise attention on a CPU, by JAX's profiler.

    python -m bench.softmax_profile [--length 8192]

Causal, float32, forward and backward. Each part of the compiled program that ran is counted once,
in the thread that ran it, without parts nested in it. The rest of a thread's time is spent on
starting parts and on waiting for them.
"""

import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.machine import cores, machine
from transformer import Mask, MaskPattern
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.reference import ScoreSpec

PARTS = {
    "matmuls": r"ynn_fusion|dot",
    "exponentials": r"exponential",
    "copies into another order": r"copy",
    "masks, sums, slices": r"fusion|select|add|multiply|slice|reduce|broadcast",
    "waiting for the other thread": r"Await",
}
"""Patterns of event names, tried in this order."""


@dataclass(frozen=True)
class Options:
    """Profile blockwise attention."""

    length: int = 8192
    """T."""
    heads: int = 4
    head_width: int = 64
    tile: int = 128
    """Queries, and keys, of a tile."""


class Span(NamedTuple):
    """Event in a thread: name, start and end in nanoseconds."""

    name: str
    start: int
    end: int


def alone(spans: Iterable[Span]) -> Counter[str]:
    """Return nanoseconds by name in one thread, excluding nested events."""
    nanoseconds_by_name: Counter[str] = Counter()
    around: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while around and around[-1].end <= span.start:
            around.pop()
        nanoseconds_by_name[span.name] += span.end - span.start
        if around:
            nanoseconds_by_name[around[-1].name] -= span.end - span.start
        around.append(span)
    return nanoseconds_by_name


def by_part(nanoseconds_by_name: Counter[str]) -> Counter[str]:
    """Return nanoseconds of each of `PARTS` and of the rest."""
    parts: Counter[str] = Counter()
    for name, nanoseconds in nanoseconds_by_name.items():
        matching = (part for part, names in PARTS.items() if re.search(names, name))
        parts[next(matching, "starting parts")] += nanoseconds
    return parts


def profiled(options: Options) -> tuple[Counter[str], float]:
    """Return nanoseconds of each part over all threads, and wall seconds without the profiler."""
    shape = (4, 1, options.length, options.heads, options.head_width)
    drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    q, k, v, cotangent = (jnp.asarray(each) for each in drawn)
    mask, score_spec = Mask(MaskPattern(causal=True)), ScoreSpec(1 / math.sqrt(options.head_width))

    def looked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_blockwise(q, k, v, mask, score_spec, block_size=options.tile).y

    def step(*heads: jax.Array) -> Any:
        return jax.vjp(looked, *heads)[1](cotangent)

    program = jax.jit(step).lower(q, k, v).compile()
    jax.block_until_ready(program(q, k, v))
    start = time.perf_counter()
    jax.block_until_ready(program(q, k, v))
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(q, k, v))
        [path] = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        total: Counter[str] = Counter()
        for plane in data.planes:
            for line in plane.lines:
                if "XLAEigen" in line.name:  # threads that run programs
                    spans = [Span(e.name, round(e.start_ns), round(e.end_ns)) for e in line.events]
                    total += by_part(alone(spans))
    return total, seconds


def main(options: Options) -> None:
    """Print the share of each part."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    parts, seconds = profiled(options)
    # A causal mask halves the two forward and five backward matrix products.
    operations = 7 * options.length**2 * options.heads * options.head_width
    rate = operations / (parts["matmuls"] / cores()) if parts["matmuls"] else math.nan
    title = f"T {options.length:,}, {seconds:.2f} s without the profiler"
    grid = Table(title=title, caption=f"the products alone: {rate:,.0f} GFLOP/s on {cores()} cores")
    grid.add_column("")
    grid.add_column("of the threads' time", justify="right")
    for part, nanoseconds in parts.most_common():
        grid.add_row(part, f"{nanoseconds / parts.total():.0%}")
    console.print(grid)


if __name__ == "__main__":
    main(tyro.cli(Options))
