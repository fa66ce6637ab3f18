"""Softmax attention by backend and against PyTorch, and the cost of every variant by length."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench.machine import cores
from bench.race.harness import OURS, Contender, peer, print_machine, print_race, take_turns
from bench.results import save_figure
from train.runtime.local_hardware import local_hardware
from transformer import (
    AttentionConfig,
    Initialization,
    Mask,
    MaskPattern,
    MixerConfig,
    Precision,
)
from transformer.attention.mixer import MixerInputs, mixer_class
from transformer.model_context import ModelContext
from transformer.testing.mixer_under_test import default_config

# Softmax attention alone --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RaceOptions:
    """Race softmax attention, forward and backward: our backends, and PyTorch's.

    The same inputs on all sides. On the GPU if there is one, else on all cores. Memory is the
    growth of the process, or of the GPU's allocator, during the run.
    """

    torch_python: Path | None = None
    """The interpreter that has PyTorch, whose `scaled_dot_product_attention` is the reference, of
    the causal mask only. None: our backends alone, the last is the reference."""
    backends: tuple[str, ...] = ("blockwise",)
    """Our backends: `AttentionConfig.backend`, or `blockwise512` for tiles of 512. One that does
    not support the mask is replaced by the reference."""
    lengths: tuple[int, ...] = (1024, 4096, 16_384)
    """T."""
    batch: int = 1
    """Number of sequences of the first length; longer ones are fewer, for as many tokens."""
    num_heads: int = 4
    window: int = 0
    """Each query sees this many keys, itself included. 0: all earlier ones."""
    segments: int = 0
    """Number of packed documents in a sequence, of equal lengths. 0: not packed."""
    padding: bool = False
    """Both directions, with rows that are filled from half to all of their length."""
    precision: Literal["float32", "bfloat16"] = "float32"
    rounds: int = 5
    steps: int = 1
    """Steps in a turn."""


def attention(options: RaceOptions) -> None:
    """Race at each length."""
    print_machine()
    for length in options.lengths:
        batch = max(1, options.batch * options.lengths[0] // length)
        settings: dict[str, Any] = {
            **dataclasses.asdict(options),
            "torch_python": "",
            "head_dim": 64,
            "batch": batch,
            "length": length,
            "threads": cores(),
        }
        sides = [
            Contender(f"ours, {backend}", (*OURS, "attention"), {**settings, "backend": backend})
            for backend in options.backends
        ]
        if options.torch_python:
            theirs = peer(options.torch_python, "attention")
            sides.append(Contender("PyTorch", theirs, settings))
        print_race(
            f"{batch} x {length:,} tokens, {options.num_heads} heads of 64, {options.precision}",
            sides,
            work=options.steps * batch * length,
            rounds=options.rounds,
            steps=options.steps,
            warmup=options.steps,
        )


# Cost by length -----------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Cost of a program at one length."""

    seconds: float
    memory: int
    """Bytes that the compiler reserves besides arguments and results."""


Costs = dict[str, dict[int, Cost]]
MAX_MEMORY = 10 * 2**30
"""Bytes; what needs more is not run, nor at greater lengths."""


def costs_by_length(
    names: Sequence[str],
    lengths: Sequence[int],
    compiled: Callable[[str, int], tuple[Any, Sequence[Any]]],
    *,
    rounds: int,
    patience: float,
) -> Costs:
    """Measure programs in turns at growing lengths.

    Args:
      names: Of the programs.
      lengths: T, growing.
      compiled: (name, length) -> the compiled program and its arguments.
      rounds: Number of timings, of which the median is taken.
      patience: Seconds for the rounds of one program at one length. What takes more than a third is
        run once, and not at greater lengths.
    """
    costs: Costs = {name: {} for name in names}
    left_out: set[str] = set()
    for length in lengths:
        sides: dict[str, Callable[[], float]] = {}
        for name in names:
            if name in left_out:
                continue
            program, arguments = compiled(name, length)
            memory = int(program.memory_analysis().temp_size_in_bytes)
            if memory > MAX_MEMORY:
                left_out.add(name)
                continue
            run = functools.partial(_seconds_of, program, arguments)
            costs[name][length] = Cost(run(), memory)
            if costs[name][length].seconds > patience / 3:
                left_out.add(name)
            else:
                sides[name] = run
        for name, seconds in take_turns(sides, rounds).items():
            costs[name][length] = costs[name][length]._replace(seconds=median(seconds))
        jax.clear_caches()
    return costs


def _seconds_of(program: Any, arguments: Sequence[Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start


def print_costs(costs: Costs, lengths: Sequence[int], **columns: Callable[[str], str]) -> None:
    """Print seconds and MiB at the lengths, and further columns by the name of the program."""
    titles = (*(f"{t:,}" for t in lengths), *columns)
    table = Table("", *titles, title="seconds, and MiB beside arguments and results")
    for name, own in costs.items():
        cells = [
            f"{own[t].seconds:.4f}, {own[t].memory / 2**20:,.1f}" if t in own else "-"
            for t in lengths
        ]
        table.add_row(name, *cells, *(column(name) for column in columns.values()))
    Console(width=160).print(table)


def draw_costs(costs: Costs, passes: str, path: Path) -> None:
    """Plot time and memory against length, on logarithmic axes."""
    figure = Figure(figsize=(10.5, 5))
    seconds, memory = figure.subplots(1, 2)
    for name, own in costs.items():
        seconds.loglog(list(own), [cost.seconds for cost in own.values()], label=name)
        memory.loglog(list(own), [cost.memory / 2**20 for cost in own.values()])
    seconds.set(xlabel="tokens", ylabel=f"seconds, {passes}")
    memory.set(xlabel="tokens", ylabel="MiB beside arguments and results")
    figure.legend(loc="outside right", fontsize="small")
    save_figure(figure, path)


EXACT = {
    "full, all scores at once": AttentionConfig(backend="reference"),
    "full, query blocks": AttentionConfig(backend="query_blocks"),
    "full, blockwise": AttentionConfig(backend="blockwise"),
}
"""Full attention with a fixed backend, besides `full` with `auto`."""

FAMILY = (
    "full",
    "latent",
    "sliding_window",
    "longformer",
    "bigbird",
    "sparse",
    "performer",
    "linear",
    "gated_delta",
    "mamba2",
    "linformer",
    "routing",
    "top_k",
    "reformer",
)


@dataclasses.dataclass(frozen=True)
class CostOptions:
    """Measure time and memory of every variant of attention against the length.

    Each variant is a whole mixer with 4 heads of 64, on one sequence of T tokens: forward and
    backward for its weights and its input. Variants take turns at one length. The exponents are the
    slopes of log time and log memory over log T from 4,096 tokens on; `crossing` is the length from
    which a variant's step is faster than that of full attention with the backend `auto`.
    """

    variants: tuple[str, ...] = (*FAMILY, *EXACT)
    """Names of mixers, or full attention with one backend: "full, blockwise"."""
    lengths: tuple[int, ...] = tuple(2**power for power in range(9, 17))
    """T, growing: 512 to 65,536."""
    rounds: int = 3
    """Number of timings per step."""
    patience: float = 20.0
    """Seconds for the rounds of one variant at one length; a slower one is left out beyond."""
    figure: Path | None = Path("docs/figures/attention_cost.png")


def attention_costs(options: CostOptions) -> None:
    """Measure, print the table and draw the figure."""
    print_machine()
    costs = costs_by_length(
        options.variants,
        options.lengths,
        _mixer_step,
        rounds=options.rounds,
        patience=options.patience,
    )
    print_costs(
        costs,
        options.lengths,
        time=lambda name: _slope(costs[name], "seconds"),
        memory=lambda name: _slope(costs[name], "memory"),
        crossing=lambda name: _crossing(costs[name], costs.get("full", {})),
    )
    if options.figure:
        draw_costs(costs, "forward and backward", options.figure)


def _mixer_step(name: str, length: int) -> tuple[Any, Sequence[Any]]:
    """Compile the gradients of a variant, with defaults but for its sizes."""
    config: MixerConfig = EXACT.get(name) or default_config(name)
    # Linformer's projections have the length of the sequence.
    sizes = {"num_heads": 4, "head_dim": 64, "max_length": length}
    names = {field.name for field in dataclasses.fields(config)}
    changes: Any = {name: size for name, size in sizes.items() if name in names}
    config = dataclasses.replace(config, **changes)
    width = 256
    shared = ModelContext(width, 2, Precision(), Initialization(), local_hardware())
    mixer = mixer_class(config)(config, shared, parent=None)
    causal = mixer.abilities(config).causal
    positions = jnp.arange(length)[None, :]
    inputs = MixerInputs(
        positions,
        Mask(MaskPattern(causal=causal), positions=positions),
        constants=mixer.constants(config, 0, width),
    )
    x = jax.random.normal(jax.random.key(0), (1, length, width))
    params = jax.jit(lambda key: mixer.init(key, x, inputs))(jax.random.key(1))

    def total(params: Any, x: jax.Array) -> jax.Array:
        output: Any = mixer.apply(params, x, inputs)
        return jnp.sum(jnp.square(output.y.astype("float32")))

    step = jax.value_and_grad(total, (0, 1))
    return jax.jit(step).lower(params, x).compile(), (params, x)


def _slope(costs: dict[int, Cost], what: str) -> str:
    """Return the exponent p of cost ~ T^p, fitted by least squares to the longer lengths."""
    points = [(t, getattr(cost, what)) for t, cost in costs.items() if t >= 4096]
    if len(points) < 2:
        return "-"
    x, y = np.log(np.array(points, float)).T
    return f"{np.polyfit(x, y, 1)[0]:.2f}"


def _crossing(costs: dict[int, Cost], full: dict[int, Cost]) -> str:
    """Return the length from which on the step is always faster than full attention's."""
    seconds = {t: (costs[t].seconds, full[t].seconds) for t in set(costs) & set(full)}
    slower = [t for t, (own, of_full) in seconds.items() if own >= of_full]
    faster = [t for t in seconds if t > max(slower, default=0)]
    return f"{min(faster):,}" if faster else "-"
