"""Where time goes in our own programs: attention, activations, compilation."""

import dataclasses
import functools
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from bench.machine import cores
from bench.race.harness import print_machine, take_turns
from train.assembly import make_engine_on, make_task
from train.config.experiment_files import find_experiment
from train.estimate.batch_shapes import unsharded_batch_shapes
from train.experiment import Experiment
from train.parallel.mesh import make_mesh
from train.runtime.local_hardware import local_hardware
from transformer import Mask, MaskPattern
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.reference import ScoreSpec
from transformer.layers.activations import ACTIVATIONS, FORMS_ON_GPU
from transformer.model_context import unconstrained
from transformer.models.model import init_compiler_options
from transformer.models.stack import LayerLoop

# Blockwise attention on a CPU ---------------------------------------------------------------------

PARTS = {
    "matmuls": r"ynn_fusion|dot",
    "exponentials": r"exponential",
    "copies into another order": r"copy",
    "masks, sums, slices": r"fusion|select|add|multiply|slice|reduce|broadcast",
    "waiting for the other thread": r"Await",
    "starting parts": "",
}
"""Patterns of event names, tried in this order."""


def attention_profile() -> None:
    """Profile blockwise attention on a CPU: causal, float32, forward and backward.

    8,192 tokens, 4 heads of 64, tiles of 128. Each part of the compiled program that ran is counted
    once, in the thread that ran it. The rest of a thread's time is spent on starting parts and on
    waiting for them.
    """
    length, heads, head_width = 8192, 4, 64
    shape = (4, 1, length, heads, head_width)
    drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    q, k, v, cotangent = (jnp.asarray(each) for each in drawn)
    mask, score_spec = Mask(MaskPattern(causal=True)), ScoreSpec(1 / math.sqrt(head_width))

    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_blockwise(q, k, v, mask, score_spec, block_size=128).y

    def step(*heads: jax.Array) -> Any:
        return jax.vjp(attended, *heads)[1](cotangent)

    program = jax.jit(step).lower(q, k, v).compile()

    jax.block_until_ready(program(q, k, v))
    parts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(q, k, v))
        [path] = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                if "XLAEigen" in line.name:  # threads that run programs
                    spans = ((e.name, round(e.start_ns), round(e.end_ns)) for e in line.events)
                    for name, nanoseconds in _without_nested(spans).items():
                        part = next(part for part, names in PARTS.items() if re.search(names, name))
                        parts[part] += nanoseconds
    # A causal mask halves the two forward and five backward matrix products.
    operations = 7 * length**2 * heads * head_width
    rate = operations / (parts["matmuls"] / cores()) if parts["matmuls"] else math.nan
    table = Table("", "of the threads' time")
    for part, nanoseconds in parts.most_common():
        table.add_row(part, f"{nanoseconds / parts.total():.0%}")
    print_machine()
    Console().print(table)
    print(f"the products alone: {rate:,.0f} GFLOP/s on {cores()} cores")


def _without_nested(spans: Iterator[tuple[str, int, int]]) -> Counter[str]:
    """Return nanoseconds by name of (name, start, end) in one thread, excluding nested events."""
    nanoseconds: Counter[str] = Counter()
    around: list[tuple[str, int, int]] = []
    for name, start, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        while around and around[-1][2] <= start:
            around.pop()
        nanoseconds[name] += end - start
        if around:
            nanoseconds[around[-1][0]] -= end - start
        around.append((name, start, end))
    return nanoseconds


# Activations --------------------------------------------------------------------------------------


def activations() -> None:
    """Time activations and their gradients, in the forms that a GPU gets and in JAX's own.

    Of 100 million numbers in bfloat16. Each program adds a bias first, as a feed-forward layer
    does, reads x (and dy) and writes one array: ReLU shows what the memory alone takes.
    """
    rows, width, precision, repeats = 32_768, 3072, "bfloat16", 50
    x, dy = (jax.random.normal(jax.random.key(n), (rows, width), precision) for n in (0, 1))
    bias = jnp.ones((1, width), precision)

    def microseconds(program: Callable[..., jax.Array], *arrays: jax.Array) -> str:
        jax.block_until_ready(program(*arrays))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(repeats - 1):
                program(*arrays)
            jax.block_until_ready(program(*arrays))
            times.append((time.perf_counter() - start) / repeats)
        return f"{median(times) * 1e6:,.0f}"

    table = Table("activation", "forward, µs", "gradient, µs")
    forms = ACTIVATIONS | {f"{name}, on a GPU": form for name, form in FORMS_ON_GPU.items()}
    for name, form in forms.items():

        def forward(
            x: jax.Array, bias: jax.Array, form: Callable[[jax.Array], jax.Array] = form
        ) -> jax.Array:
            return form(x + bias)

        def gradient(
            x: jax.Array, bias: jax.Array, dy: jax.Array, forward: Any = forward
        ) -> jax.Array:
            return jax.vjp(lambda x: forward(x, bias), x)[1](dy)[0]

        own = microseconds(jax.jit(forward), x, bias)
        table.add_row(name, own, microseconds(jax.jit(gradient), x, bias, dy))
    print_machine()
    Console().print(table)


# Compilation --------------------------------------------------------------------------------------


def compile_time(program: tyro.conf.Positional[Literal["step", "initial-weights"]]) -> None:
    """Time the compiler on one of two programs."""
    jax.config.update("jax_enable_compilation_cache", False)
    {"step": _compile_steps, "initial-weights": _compile_initial_weights}[program]()


def _compile_steps() -> None:
    """Compile the step of `gpt2:xl` with 48 and 12 scanned layers and 12 unrolled ones, in turns.

    From tracing to machine code; nothing is allocated.
    """
    xl = find_experiment("gpt2:xl")
    sides: dict[str, Callable[[], float]] = {}
    cases: list[tuple[int, LayerLoop]] = [(48, "scan"), (12, "scan"), (12, "unroll")]
    for layers, loop in cases:
        model = dataclasses.replace(xl.model, num_layers=layers, layer_loop=loop)
        experiment = dataclasses.replace(xl, model=model, batch_size=2, grad_accum_steps=1)
        sides[f"{layers} layers, {loop}"] = functools.partial(_compile_seconds, experiment)
    for name, seconds in take_turns(sides, rounds=3).items():
        print(f"{name}: {median(seconds):.1f} s")


def _compile_seconds(experiment: Experiment) -> float:
    """Return the seconds to trace, lower and compile the training step."""
    jax.clear_caches()
    engine = make_engine_on(make_mesh(experiment.mesh), experiment, local_hardware())
    batch: Any = unsharded_batch_shapes(experiment, experiment.batch_size)
    state = engine.abstract_state()
    start = time.perf_counter()
    engine.lower_step(state, batch).compile()
    return time.perf_counter() - start


def _compile_initial_weights() -> None:
    """Compile and run the program that draws initial weights, which runs once.

    With all of XLA's optimizations and with those of `init_compiler_options`, in turns; the seconds
    of all cores.
    """
    for config in ("quickstart", "gpt2"):
        sides = {
            "all passes": functools.partial(_init_seconds, config, None),
            "few passes": functools.partial(_init_seconds, config, init_compiler_options("cpu")),
        }
        for name, seconds in take_turns(sides, rounds=3).items():
            compiling, drawing = np.median(seconds, axis=0)
            print(f"{config}, {name}: compiled in {compiling:.1f} s, drawn in {drawing:.1f} s")


def _init_seconds(config: str, options: dict[str, Any] | None) -> tuple[float, float]:
    """Return processor seconds to compile the initial weights of a config, and to draw them."""
    model = make_task(find_experiment(config)).make_model(local_hardware(), unconstrained)
    if not model.config.vocab_size:  # the data decide
        model = model.clone(config=dataclasses.replace(model.config, vocab_size=8192))
    key = jax.random.key(0)
    lowered = jax.jit(model.init_params).lower(key)
    start = time.process_time()
    draw = lowered.compile(compiler_options=options)
    compiled = time.process_time()
    jax.block_until_ready(draw(key))
    return compiled - start, time.process_time() - compiled
