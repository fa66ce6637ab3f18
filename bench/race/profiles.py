"""Where time goes in our own programs: attention, activations, compilation."""

import dataclasses
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


def attention_profile(argv: list[str]) -> None:
    """Print the share of each part."""
    tyro.cli(_profile_attention, args=argv)


def _profile_attention(
    length: int = 8192, heads: int = 4, head_width: int = 64, tile: int = 128
) -> None:
    """Profile blockwise attention on a CPU: causal, float32, forward and backward.

    Each part of the compiled program that ran is counted once, in the thread that ran it. The rest
    of a thread's time is spent on starting parts and on waiting for them.

    Args:
      length: T.
      heads: Number of heads.
      head_width: Width of a head.
      tile: Queries, and keys, of a tile.
    """
    shape = (4, 1, length, heads, head_width)
    drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    q, k, v, cotangent = (jnp.asarray(each) for each in drawn)
    mask, score_spec = Mask(MaskPattern(causal=True)), ScoreSpec(1 / math.sqrt(head_width))

    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_blockwise(q, k, v, mask, score_spec, block_size=tile).y

    def step(*heads: jax.Array) -> Any:
        return jax.vjp(attended, *heads)[1](cotangent)

    program = jax.jit(step).lower(q, k, v).compile()

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(q, k, v))
        return time.perf_counter() - start

    run()
    seconds = run()
    parts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
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
    table = Table(
        "",
        "of the threads' time",
        title=f"T {length:,}, {seconds:.2f} s without the profiler",
        caption=f"the products alone: {rate:,.0f} GFLOP/s on {cores()} cores",
    )
    for part, nanoseconds in parts.most_common():
        table.add_row(part, f"{nanoseconds / parts.total():.0%}")
    print_machine(Console())
    Console().print(table)


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


def activations(argv: list[str]) -> None:
    """Print a table in microseconds."""
    tyro.cli(_time_activations, args=argv)


def _time_activations(
    rows: int = 32_768,
    width: int = 3072,
    precision: Literal["float32", "bfloat16"] = "bfloat16",
    repeats: int = 50,
) -> None:
    """Time activations and their gradients, in the forms that a GPU gets and in JAX's own.

    Each program adds a bias first, as a feed-forward layer does, reads x (and dy) and writes one
    array: ReLU shows what the memory alone takes.

    Args:
      rows: Rows of x.
      width: Numbers in a row.
      precision: Dtype of all arrays.
      repeats: Runs in a round; the median of five rounds is shown.
    """
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

    table = Table("activation", "forward, µs", "gradient, µs", box=None)
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

        times = (
            microseconds(jax.jit(forward), x, bias),
            microseconds(jax.jit(gradient), x, bias, dy),
        )
        table.add_row(name, *times)
    console = Console(width=120)
    print_machine(console)
    console.print(table)


# Compilation --------------------------------------------------------------------------------------

VOCAB_SIZE = 8192
"""Of models whose vocabulary the data decide."""


def compile_time(argv: list[str]) -> None:
    """Time the compiler on one of two programs."""
    programs: Any = {"step": _compile_steps, "initial-weights": _compile_initial_weights}
    tyro.extras.subcommand_cli_from_dict(programs, args=argv)


def _compile_steps(layers: int = 48, against: int = 12, rounds: int = 3) -> None:
    """Compile the step of `gpt2:xl` with scanned layers, at two depths of the same width, in turns.

    From tracing to machine code; nothing is allocated. The unrolled step of the shallow model is
    also shown.

    Args:
      layers: Of the deep model.
      against: Layers of the shallow model, to whose scanned step ratios are.
      rounds: Turns of each.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    cases: list[tuple[int, LayerLoop]] = [(layers, "scan"), (against, "scan"), (against, "unroll")]

    def compiling(layers: int, loop: LayerLoop) -> Callable[[], float]:
        xl = find_experiment("gpt2:xl")
        model = dataclasses.replace(xl.model, num_layers=layers, layer_loop=loop)
        experiment = dataclasses.replace(xl, model=model, batch_size=2, grad_accum_steps=1)
        return lambda: _compile_seconds(experiment)

    names = [f"{depth} layers, {loop}" for depth, loop in cases]
    sides = {name: compiling(*case) for name, case in zip(names, cases, strict=True)}
    results = take_turns(sides, rounds)
    table = Table("", "seconds", "ratio", title="compiling the gpt2:xl step")
    for name, seconds in results.items():
        ratio = median(s / b for s, b in zip(seconds, results[names[1]], strict=True))
        table.add_row(name, f"{median(seconds):.1f}", f"{ratio:.2f}")
    Console().print(table)


def _compile_seconds(experiment: Experiment) -> float:
    """Return the seconds to trace, lower and compile the training step."""
    jax.clear_caches()
    engine = make_engine_on(make_mesh(experiment.mesh), experiment, local_hardware())
    batch: Any = unsharded_batch_shapes(experiment, experiment.batch_size)
    state = engine.abstract_state()
    start = time.perf_counter()
    engine.lower_step(state, batch).compile()
    return time.perf_counter() - start


def _compile_initial_weights(
    configs: tuple[str, ...] = ("quickstart", "gpt2"), rounds: int = 3
) -> None:
    """Compile and run the program that draws initial weights, which runs once.

    With all of XLA's optimizations and with those of `init_compiler_options`, in turns; the seconds
    of all cores.

    Args:
      configs: Whose weights are drawn.
      rounds: Turns of each.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    few = init_compiler_options("cpu")
    table = Table("config", "passes", "compile", "run", "ratio", title="initial weights, CPU")
    for config in configs:
        results = [(_init_seconds(config, None), _init_seconds(config, few)) for _ in range(rounds)]
        ratio = median(sum(one) / sum(other) for one, other in results)
        all_passes, few_passes = np.median(results, axis=0)  # each [compile, run]
        table.add_row(config, "all", *(f"{each:.1f}" for each in all_passes), "")
        table.add_row(config, "few", *(f"{each:.1f}" for each in few_passes), f"{ratio:.1f}")
    Console().print(table)


def _init_seconds(config: str, options: dict[str, Any] | None) -> tuple[float, float]:
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
