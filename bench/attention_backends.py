"""Time of each attention backend by mask and length, forward and backward, on this device.

    python -m bench.attention_backends [--cases "documents 8 x 4096: cudnn reference" ...]

The default cases have 32,768 tokens each. All programs are compiled first, several at a time; then
each is timed alone. "error" is the largest distance of y and its gradients from those
of the case's first backend, relative to their norm. The defaults suit a GPU of 80 GB or more.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.machine import machine
from train.runtime.local_hardware import local_hardware
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.cudnn import attend_cudnn
from transformer.attention.backends.query_blocks import attend_query_blocks
from transformer.attention.reference import ScoreSpec, attend_reference

CASES = (
    "causal 32 x 1024: cudnn reference query_blocks blockwise512 blockwise1024",
    "causal 8 x 4096: cudnn reference query_blocks blockwise256 blockwise512 blockwise1024",
    "causal 2 x 16384: cudnn blockwise512 blockwise1024 blockwise2048",
    "documents 128 x 256: cudnn reference query_blocks",
    "documents 32 x 1024: cudnn reference query_blocks blockwise512",
    "documents 8 x 4096: cudnn reference query_blocks blockwise512 blockwise1024",
    "documents 2 x 16384: cudnn blockwise512 blockwise1024",
    "window 8 x 4096: cudnn reference blockwise256 blockwise512",
    "window 2 x 16384: cudnn blockwise256 blockwise512 blockwise1024",
    "padding 64 x 512: cudnn reference blockwise512",
    "padding 8 x 4096: cudnn reference blockwise512",
)
WINDOW, DOCUMENTS = 256, 4


@dataclasses.dataclass(frozen=True)
class Options:
    """Time the attention backends."""

    cases: tuple[str, ...] = CASES
    """A mask (causal, documents: four in a row, window: of 256, padding: in both directions), the
    rows and their length, and backends; `blockwise512` has tiles of 512."""
    num_heads: int = 12
    head_dim: int = 64
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    rounds: int = 5
    seconds: float = 0.1
    """Length of a round, at least one step."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One backend on one mask and size."""

    mask: str
    rows: int
    length: int
    backend: str


def parse_cases(options: Options) -> list[Case]:
    """Return the cases of all lines."""
    found = []
    for line in options.cases:
        size, _, backends = line.partition(":")
        mask, rows, _, length = size.split()
        found += [Case(mask, int(rows), int(length), each) for each in backends.split()]
    return found


def make_mask(case: Case) -> Mask:
    """Return the mask of a case."""
    token = jnp.arange(case.length, dtype=jnp.int32)[None]
    if case.mask == "documents":
        segments = jnp.broadcast_to(1 + token * DOCUMENTS // case.length, (case.rows, case.length))
        return Mask(MaskPattern(causal=True), segments=segments)
    if case.mask == "padding":
        lengths = jnp.linspace(case.length // 2, case.length, case.rows)[:, None]
        return Mask(segments=(token < lengths).astype(jnp.int32))
    return Mask(MaskPattern(causal=True, window=WINDOW if case.mask == "window" else 0))


def make_step(case: Case, options: Options) -> Callable[..., Any]:
    """Return (q, k, v, dy, mask) -> (y, dq, dk, dv)."""
    spec = ScoreSpec(1 / math.sqrt(options.head_dim))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        if case.backend == "cudnn":
            return attend_cudnn(q, k, v, mask, spec)
        if case.backend == "query_blocks":
            return attend_query_blocks(q, k, v, mask, spec)
        if case.backend == "reference":
            return attend_reference(q, k, v, mask, spec)[0]
        size = int(case.backend.removeprefix("blockwise"))
        return attend_blockwise(q, k, v, mask, spec, block_size=size).y

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array, mask: Mask) -> Any:
        y, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
        return y, *vjp(dy)

    return step


def make_inputs(case: Case, options: Options) -> list[jax.Array]:
    """Return random q, k, v and dy."""
    shape = (case.rows, case.length, options.num_heads, options.head_dim)
    keys = jax.random.split(jax.random.key(case.length), 4)
    return [jax.random.normal(key, shape, options.precision) for key in keys]


def measure(
    case: Case, program: Any, options: Options, first: list[Any] | None
) -> tuple[float, float, list[Any]]:
    """Return seconds of a step, the error relative to `first`, and the results."""
    inputs = (*make_inputs(case, options), make_mask(case))
    results = jax.block_until_ready(program(*inputs))
    start = time.perf_counter()
    jax.block_until_ready(program(*inputs))
    repeats = max(1, int(options.seconds / (time.perf_counter() - start)))
    times = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        for _ in range(repeats - 1):
            program(*inputs)
        jax.block_until_ready(program(*inputs))
        times.append((time.perf_counter() - start) / repeats)
    # Of the first row: the whole would need as much memory again.
    own = [np.asarray(each[:1].astype(jnp.float32)) for each in results]
    error = max(
        (
            float(np.linalg.norm(a - b) / np.linalg.norm(b))
            for a, b in zip(own, first or own, strict=True)
        ),
        default=0.0,
    )
    return median(times), error, own


def main(options: Options, hardware: Hardware | None = None) -> None:
    """Compile all, then time one after the other and print a table."""
    hardware = hardware or local_hardware()
    cases = [
        each
        for each in parse_cases(options)
        if each.backend != "cudnn" or hardware.platform == "gpu"
    ]
    with ThreadPoolExecutor() as pool:
        programs = list(
            pool.map(
                lambda case: (
                    jax.jit(make_step(case, options))
                    .lower(*make_inputs(case, options), make_mask(case))
                    .compile()
                ),
                cases,
            )
        )
    table = Table("mask", "size", "backend", "ms", "temporaries, MiB", "error", box=None)
    first: dict[tuple[str, int], list[Any]] = {}
    for case, program in zip(cases, programs, strict=True):
        key = case.mask, case.length
        seconds, error, results = measure(case, program, options, first.get(key))
        first.setdefault(key, results)
        memory: Any = program.memory_analysis()
        temporaries = memory.temp_size_in_bytes / 2**20
        cells = (f"{seconds * 1e3:.3g}", f"{temporaries:,.0f}", f"{error:.1e}")
        table.add_row(case.mask, f"{case.rows} x {case.length:,}", case.backend, *cells)
    console = Console(width=120)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
