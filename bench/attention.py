"""Time and memory of every attention variant against sequence length.

    python -m bench.attention [--variants full sliding_window ...] [--lengths 512 4096 ...]

Each variant is a whole mixer, projections included, on one sequence of T tokens: forward and
backward for its weights and its input, and with `--forward` also the forward pass alone. Variants
take turns at one length, and the median over rounds is reported. A variant whose step takes longer
than
a third of `--patience`, or needs more than `--most`, is skipped at greater lengths. Memory is what
the compiler reserves besides arguments and results. The exponents are the slopes of log time
and log memory over log T from 4,096 tokens on; `crossing` is the length from which a variant's step
is faster than that of full attention with the backend `auto`.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib import pyplot
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.machine import machine
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
class Options:
    """Measure every variant of attention against the length."""

    variants: tuple[str, ...] = (*FAMILY, *EXACT)
    """Names of mixers, or of entries of `EXACT`."""
    lengths: tuple[int, ...] = tuple(2**power for power in range(9, 17))
    """T, growing: 512 to 65,536."""
    num_heads: int = 4
    head_dim: int = 64
    rounds: int = 3
    """Number of timings per step."""
    patience: float = 20.0
    """Seconds for the rounds of one variant at one length."""
    most: float = 8.0
    """Memory limit of a step, in GiB."""
    forward: bool = False
    """Also time the forward pass alone."""
    compute: Literal["float32", "bfloat16"] = "float32"
    figure: Path | None = Path("docs/figures/attention_cost.png")
    output: Path | None = None
    """JSON file for the numbers."""


@dataclasses.dataclass
class Cost:
    """Cost of one variant at one length."""

    step: float
    """Seconds, forward and backward."""
    forward: float | None
    """Seconds."""
    memory: int
    """Bytes reserved for a step besides arguments and results."""


Costs = dict[str, dict[int, Cost]]


def config_of(name: str, options: Options, length: int) -> MixerConfig:
    """Return a variant with the requested sizes and defaults otherwise."""
    config = EXACT.get(name) or default_config(name)
    sizes: dict[str, Any] = dict(num_heads=options.num_heads, head_dim=options.head_dim)
    names = {field.name for field in dataclasses.fields(config)}
    if "max_length" in names:  # Linformer's projections have the length of the sequence
        sizes["max_length"] = length
    return dataclasses.replace(config, **{k: v for k, v in sizes.items() if k in names})


def programs(config: MixerConfig, options: Options, length: int) -> tuple[list[Any], int]:
    """Compile the step (and the forward pass on request); return the calls and the step's bytes."""
    width = options.num_heads * options.head_dim
    precision = Precision(compute=options.compute)
    shared = ModelContext(width, 2, precision, Initialization(), local_hardware())
    mixer = mixer_class(config)(config, shared, parent=None)
    causal = mixer.abilities(config).causal
    positions = jnp.arange(length)[None, :]
    inputs = MixerInputs(
        positions,
        Mask(MaskPattern(causal=causal), positions=positions),
        constants=mixer.constants(config, 0, width),
    )
    x = jax.random.normal(jax.random.key(0), (1, length, width), precision.compute)
    params = jax.jit(lambda key: mixer.init(key, x, inputs))(jax.random.key(1))

    def total(params: Any, x: jax.Array) -> jax.Array:
        output: Any = mixer.apply(params, x, inputs)
        return jnp.sum(jnp.square(output.y.astype("float32")))

    functions: list[Any] = [
        jax.value_and_grad(total, (0, 1)),
        *([total] if options.forward else []),
    ]
    compiled = [jax.jit(each).lower(params, x).compile() for each in functions]
    calls = [functools.partial(each, params, x) for each in compiled]
    memory: Any = compiled[0].memory_analysis()
    return calls, int(memory.temp_size_in_bytes)


def seconds(call: Callable[[], Any]) -> float:
    """Return the wall time until the results are ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def measured(options: Options) -> Costs:
    """Measure all variants at all lengths within their limits."""
    costs: Costs = {name: {} for name in options.variants}
    over_limit: set[str] = set()
    for length in track(options.lengths, "lengths"):
        for name, cost in at_length(options, length, over_limit).items():
            costs[name][length] = cost
        save(costs, options.output)
        jax.clear_caches()
    return costs


def at_length(options: Options, length: int, over_limit: set[str]) -> dict[str, Cost]:
    """Measure variants in turns at one length; add those that reach a limit to `over_limit`."""
    ready: dict[str, Any] = {}
    for name in options.variants:
        if name in over_limit:
            continue
        calls, memory = programs(config_of(name, options, length), options, length)
        if memory > options.most * 2**30:
            over_limit.add(name)
            continue
        first = [seconds(call) for call in calls]
        slow = first[0] > options.patience / 3
        over_limit |= {name} if slow else set()
        ready[name] = (calls, memory, [[each] if slow else [] for each in first])
    for _ in range(options.rounds):
        for name in ready.keys() - over_limit:
            calls, _, times = ready[name]
            for call, costs in zip(calls, times, strict=True):
                costs.append(seconds(call))
    return {
        name: Cost(median(times[0]), median(times[1]) if times[1:] else None, memory)
        for name, (_, memory, times) in ready.items()
    }


def save(costs: Costs, path: Path | None) -> None:
    """Save the measurements so far."""
    if path:
        plain = {
            name: {t: dataclasses.asdict(cost) for t, cost in found.items()}
            for name, found in costs.items()
        }
        path.write_text(json.dumps({"machine": machine(), "costs": plain}, indent=1))


def slope(costs: dict[int, Cost], what: str) -> float | None:
    """Return the exponent p of cost ~ T^p, fitted by least squares to the longer lengths."""
    points = [(t, getattr(cost, what)) for t, cost in costs.items() if t >= FIRST_OF_SLOPE]
    if len(points) < 2:
        return None
    x, y = np.log(np.array(points, float)).T
    return float(np.polyfit(x, y, 1)[0])


def crossing(costs: dict[int, Cost], full: dict[int, Cost]) -> int | None:
    """Return the length from which on the step is always faster than full attention's."""
    both = sorted(set(costs) & set(full))
    later = [t for t in both if all(costs[u].step < full[u].step for u in both if u >= t)]
    return min(later, default=None)


def table(costs: Costs, lengths: list[int]) -> Table:
    """Return a table with one row per variant."""
    lengths_shown = [t for t in lengths if t in (1024, 4096, 16_384, 65_536)] or lengths[-1:]
    grid = Table(title="forward and backward, seconds and MiB")
    for title in ("", *(f"{t:,}" for t in lengths_shown), "time ~ T^", "memory ~ T^", "crossing"):
        grid.add_column(title, justify="left" if not title else "right")
    for name, costs_of_variant in costs.items():
        cells = [
            f"{costs_of_variant[t].step:.3f} s, {costs_of_variant[t].memory / 2**20:,.0f}"
            if t in costs_of_variant
            else "-"
            for t in lengths_shown
        ]
        slopes = (slope(costs_of_variant, what) for what in ("step", "memory"))
        exponents = ["-" if each is None else f"{each:.2f}" for each in slopes]
        cross = crossing(costs_of_variant, costs.get("full", {})) if name != "full" else None
        grid.add_row(name, *cells, *exponents, f"{cross:,}" if cross else "-")
    return grid


def draw(costs: Costs, path: Path) -> None:
    """Plot time and memory against length, on logarithmic axes."""
    fig, axes = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    colours = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for index, (name, costs_of_variant) in enumerate(costs.items()):
        style: Any = dict(label=name, color=colours[index % 20], marker=".")
        style["linestyle"] = "--" if name.startswith("full") else "-"
        axes[0].loglog(
            list(costs_of_variant), [cost.step for cost in costs_of_variant.values()], **style
        )
        axes[1].loglog(
            list(costs_of_variant),
            [cost.memory / 2**20 for cost in costs_of_variant.values()],
            **style,
        )
    axes[0].set(xlabel="tokens", ylabel="seconds, forward and backward")
    axes[1].set(xlabel="tokens", ylabel="MiB beside arguments and results")
    axes[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    pyplot.close(fig)


def main(options: Options) -> None:
    """Measure, print the table and draw the figure."""
    unknown = [name for name in options.variants if name not in {*MIXERS, *EXACT}]
    if unknown:
        raise SystemExit(f"variant {unknown[0]}: is not known; give some of {', '.join(FAMILY)}")
    lengths = list(options.lengths)
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    costs = measured(options)
    console.print(table(costs, lengths))
    if options.figure:
        draw(costs, options.figure)


if __name__ == "__main__":
    main(tyro.cli(Options))
