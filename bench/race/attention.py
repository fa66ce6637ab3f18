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
import tyro
from matplotlib import pyplot
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.machine import cores
from bench.race.harness import OURS, Contender, peer, print_machine, print_race
from train.runtime.local_hardware import local_hardware
from transformer import (
    MIXERS,
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
    """The interpreter that has PyTorch, whose `scaled_dot_product_attention` is the reference.
    None: our backends alone, the last is the reference."""
    backends: tuple[str, ...] = ("blockwise",)
    """Our backends: `AttentionConfig.backend`, or `blockwise512` for tiles of 512. One that does
    not support the mask is replaced by the reference."""
    lengths: tuple[int, ...] = (1024, 4096, 16_384)
    """T."""
    batch: int = 1
    """Number of sequences of the first length; longer ones are fewer, for as many tokens."""
    num_heads: int = 4
    head_dim: int = 64
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


def attention(argv: list[str]) -> None:
    """Race at each length."""
    options = tyro.cli(RaceOptions, args=argv)
    print_machine(Console())
    masks = ["padding" if options.padding else "causal"]
    masks += [f"window {options.window}"] if options.window else []
    masks += [f"{options.segments} documents"] if options.segments else []
    for length in options.lengths:
        shared = ("num_heads", "head_dim", "window", "segments", "padding", "precision")
        settings: dict[str, Any] = {name: getattr(options, name) for name in shared}
        batch = max(1, options.batch * options.lengths[0] // length)
        settings |= {"batch": batch, "length": length, "threads": cores()}
        sides = [
            Contender(f"ours, {backend}", (*OURS, "attention"), {**settings, "backend": backend})
            for backend in options.backends
        ]
        if options.torch_python:
            theirs = peer(options.torch_python, "attention")
            sides.append(Contender("PyTorch", theirs, settings))
        print_race(
            f"{batch} x {length:,} tokens, {options.num_heads} heads of {options.head_dim}, "
            f"{options.precision}, {', '.join(masks)}",
            sides,
            reference=sides[-1].name,
            work=options.steps * batch * length,
            unit="tokens",
            rounds=options.rounds,
            steps=options.steps,
            warmup=options.steps,
        )


# Cost by length -----------------------------------------------------------------------------------


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the wall time until the results are ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


class Cost(NamedTuple):
    """Cost of a program at one length."""

    seconds: float | None
    """None: not run."""
    memory: int
    """Bytes that the compiler reserves besides arguments and results."""


Costs = dict[str, dict[int, Cost]]


def costs_by_length(
    names: Sequence[str],
    lengths: Sequence[int],
    compiled: Callable[[str, int], tuple[Any, Sequence[Any]]],
    *,
    rounds: int,
    patience: float,
    max_gib: float,
    memory_of_all: bool = False,
) -> Costs:
    """Measure programs in turns at growing lengths.

    Args:
      names: Of the programs.
      lengths: T, growing.
      compiled: (name, length) -> the compiled program and its arguments.
      rounds: Number of timings, of which the median is taken.
      patience: Seconds for the rounds of one program at one length. What takes longer is run once,
        and not at greater lengths.
      max_gib: Memory in GiB; what needs more is not run, nor at greater lengths.
      memory_of_all: Compile what is not run too, for its memory.
    """
    costs: Costs = {name: {} for name in names}
    over_limit: set[str] = set()
    for length in track(lengths, "lengths"):
        calls: dict[str, Callable[[], Any]] = {}
        times: dict[str, list[float]] = {}
        for name in names:
            if name in over_limit and not memory_of_all:
                continue
            program, arguments = compiled(name, length)
            memory = int(program.memory_analysis().temp_size_in_bytes)
            if memory > max_gib * 2**30:
                over_limit.add(name)
            if name not in over_limit:
                calls[name] = functools.partial(program, *arguments)
                first = seconds_of(calls[name])
                times[name] = [first] if first > patience / 3 else []
            if name not in over_limit or memory_of_all:
                costs[name][length] = Cost(None, memory)
        over_limit |= {name for name, measured in times.items() if measured}
        for _ in range(rounds):
            for name in calls.keys() - over_limit:
                times[name].append(seconds_of(calls[name]))
        for name, measured in times.items():
            costs[name][length] = costs[name][length]._replace(seconds=median(measured))
        jax.clear_caches()
    return costs


def draw_costs(costs: Costs, labels: Sequence[str], passes: str, path: Path) -> None:
    """Plot time and memory against length, on logarithmic axes."""
    fig, axes = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    colors = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for index, (label, costs_of_one) in enumerate(zip(labels, costs.values(), strict=True)):
        style: Any = dict(color=colors[index % 20], marker=".")
        style["linestyle"] = "--" if label.startswith("full") else "-"
        run = {t: cost.seconds for t, cost in costs_of_one.items() if cost.seconds is not None}
        axes[0].loglog(list(run), list(run.values()), label=label, **style)
        mebibytes = [cost.memory / 2**20 for cost in costs_of_one.values()]
        axes[1].loglog(list(costs_of_one), mebibytes, **style)
    axes[0].set(xlabel="tokens", ylabel=f"seconds, {passes}")
    axes[1].set(xlabel="tokens", ylabel="MiB beside arguments and results")
    axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    pyplot.close(fig)


FIRST_OF_SLOPE = 4096
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

    Each variant is a whole mixer, projections included, on one sequence of T tokens: forward and
    backward for its weights and its input. Variants take turns at one length. The exponents are the
    slopes of log time and log memory over log T from 4,096 tokens on; `crossing` is the length from
    which a variant's step is faster than that of full attention with the backend `auto`.
    """

    variants: tuple[str, ...] = (*FAMILY, *EXACT)
    """Names of mixers, or full attention with one backend: "full, blockwise"."""
    lengths: tuple[int, ...] = tuple(2**power for power in range(9, 17))
    """T, growing: 512 to 65,536."""
    num_heads: int = 4
    head_dim: int = 64
    rounds: int = 3
    """Number of timings per step."""
    patience: float = 20.0
    """Seconds for the rounds of one variant at one length; a slower one is left out beyond."""
    most: float = 8.0
    """Memory limit of a step, in GiB."""
    figure: Path | None = Path("docs/figures/attention_cost.png")


def attention_costs(argv: list[str]) -> None:
    """Measure, print the table and draw the figure."""
    options, console = tyro.cli(CostOptions, args=argv), Console()
    unknown = [name for name in options.variants if name not in {*MIXERS, *EXACT}]
    if unknown:
        raise SystemExit(f"variant {unknown[0]}: is not known; give some of {', '.join(FAMILY)}")
    print_machine(console)
    costs = costs_by_length(
        options.variants,
        options.lengths,
        functools.partial(_mixer_step, options),
        rounds=options.rounds,
        patience=options.patience,
        max_gib=options.most,
    )
    lengths_shown = [t for t in options.lengths if t in (1024, 4096, 16_384, 65_536)]
    lengths_shown = lengths_shown or list(options.lengths[-1:])
    table = Table(title="forward and backward, seconds and MiB")
    for title in ("", *(f"{t:,}" for t in lengths_shown), "time ~ T^", "memory ~ T^", "crossing"):
        table.add_column(title, justify="left" if not title else "right")
    for name, costs_of_variant in costs.items():
        cells = [
            f"{costs_of_variant[t].seconds:.3f} s, {costs_of_variant[t].memory / 2**20:,.0f}"
            if t in costs_of_variant
            else "-"
            for t in lengths_shown
        ]
        exponents = (_slope(costs_of_variant, what) for what in ("seconds", "memory"))
        crossing = _crossing(costs_of_variant, costs.get("full", {})) if name != "full" else "-"
        table.add_row(name, *cells, *exponents, crossing)
    console.print(table)
    if options.figure:
        draw_costs(costs, list(costs), "forward and backward", options.figure)


def _mixer_step(options: CostOptions, name: str, length: int) -> tuple[Any, Sequence[Any]]:
    """Compile the gradients of a variant, with the requested sizes and defaults otherwise."""
    config: MixerConfig = EXACT.get(name) or default_config(name)
    sizes = {"num_heads": options.num_heads, "head_dim": options.head_dim}
    sizes["max_length"] = length  # Linformer's projections have the length of the sequence
    names = {field.name for field in dataclasses.fields(config)}
    changes: Any = {name: size for name, size in sizes.items() if name in names}
    config = dataclasses.replace(config, **changes)
    width = options.num_heads * options.head_dim
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
    points = [(t, getattr(cost, what)) for t, cost in costs.items() if t >= FIRST_OF_SLOPE]
    if len(points) < 2:
        return "-"
    x, y = np.log(np.array(points, float)).T
    return f"{np.polyfit(x, y, 1)[0]:.2f}"


def _crossing(costs: dict[int, Cost], full: dict[int, Cost]) -> str:
    """Return the length from which on the step is always faster than full attention's."""
    seconds = {t: (costs[t].seconds or 0, full[t].seconds or 0) for t in set(costs) & set(full)}
    slower = [t for t, (own, of_full) in seconds.items() if own >= of_full]
    faster = [t for t in seconds if t > max(slower, default=0)]
    return f"{min(faster):,}" if faster else "-"
