"""Attention within a window in four ways: time and memory against sequence length.

    python -m bench.longformer [--longest 16384]
    python -m bench.longformer --against hf --torch-python ~/torch/bin/python

Figure 1 of Beltagy et al. 2020, from this code: all scores of full attention; a loop over the
diagonals of the window (section 3.2's memory-efficient but slow form); overlapping chunks
of two windows, as matrix products; and this library's tiles. All four compute the same
results, which is checked before anything is timed. Memory is what the compiler reserves for a
forward pass besides arguments and results; what would need more than `--most` is not run.

`--against hf` times the mixer `longformer` beside Hugging Face's module, projections included, in
processes that take turns, and compares how the memory of both sides' BigBird grows with length.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

from bench.attention import seconds
from bench.longformer_race import race_both
from bench.machine import machine
from bench.window_forms import FORMS
from train.errors import UserError


@dataclass(frozen=True)
class Options:
    """Draw Longformer's figure, or race Hugging Face's modules."""

    against: Literal["", "hf"] = ""
    """Race the mixers beside Hugging Face's instead of drawing the figure."""
    torch_python: Path = Path(sys.executable)
    """The interpreter that has PyTorch and transformers."""
    shortest: int = 512
    longest: int = 16_384
    """Lengths of the figure."""
    race_length: int = 4096
    """Length of the comparison with Hugging Face."""
    race_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """At which the memory of BigBirds is compared."""
    window: int = 256
    """Keys on each side."""
    heads: int = 4
    head_width: int = 64
    rounds: int = 5
    """Number of timings."""
    patience: float = 20.0
    """Seconds beyond which an implementation is skipped at greater lengths."""
    most: float = 10.0
    """GiB of memory beyond which a form is not run."""
    figure: Path | None = Path("docs/figures/longformer.png")


class Cost(NamedTuple):
    """Cost of one implementation at one length."""

    seconds: float | None
    """None: not run."""
    memory: int
    """Bytes."""


Costs = dict[str, dict[int, Cost]]


Heads = tuple[jax.Array, jax.Array, jax.Array]


def inputs(length: int, heads: int, width: int) -> Heads:  # [1, T, N, H] each
    """Return queries, keys and values."""
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(3, 1, length, heads, width)).astype(np.float32)
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)


def check(window: int = 8, length: int = 56) -> None:
    """Raise AssertionError unless all implementations agree to 1e-5."""
    heads = inputs(length, 3, 5)
    results = {name: np.asarray(form(*heads, window=window)) for name, form in FORMS.items()}
    expected = results["full"]
    for name, actual in results.items():
        difference = np.abs(actual - expected).max()
        limit = 1e-5 * max(1, np.abs(expected).max())
        assert difference <= limit, f"{name}: {difference:.1e} off"


def measured(options: Options, lengths: Sequence[int]) -> Costs:
    """Measure all implementations at all lengths, in turns."""
    costs: Costs = {name: {} for name in FORMS}
    over_limit: set[str] = set()
    for length in track(lengths, "lengths"):
        heads = inputs(length, options.heads, options.head_width)
        calls: dict[str, Callable[[], Any]] = {}
        for name, form in FORMS.items():
            cut = functools.partial(form, window=options.window)
            program = jax.jit(cut).lower(*heads).compile()
            memory: Any = program.memory_analysis()
            costs[name][length] = Cost(None, int(memory.temp_size_in_bytes))
            if name not in over_limit and costs[name][length].memory <= options.most * 2**30:
                calls[name] = functools.partial(program, *heads)
        first = {name: seconds(call) for name, call in calls.items()}
        over_limit |= {name for name, taken in first.items() if taken > options.patience / 3}
        rounds = [
            {name: seconds(call) for name, call in calls.items() if name not in over_limit}
            for _ in range(options.rounds)
        ]
        for name, taken in first.items():
            times = [each[name] for each in rounds if name in each] or [taken]
            costs[name][length] = costs[name][length]._replace(seconds=median(times))
    return costs


def table(costs: Costs, lengths: Sequence[int]) -> Table:
    """Return a row for each implementation."""
    grid = Table(title="forward: milliseconds, MiB beside arguments and results")
    for title in ("", *(f"{length:,}" for length in lengths)):
        grid.add_column(title, justify="right" if title else "left")
    for name, costs_of_form in costs.items():
        cells = [
            f"{'-' if cost.seconds is None else f'{1e3 * cost.seconds:,.1f}'}, "
            f"{cost.memory / 2**20:,.1f}"
            for cost in costs_of_form.values()
        ]
        grid.add_row(name, *cells)
    return grid


def draw(costs: Costs, path: Path) -> None:
    """Draw time and memory against length, as in the paper."""
    fig, axes = pyplot.subplots(1, 2, figsize=(9.5, 3.9), layout="constrained")
    for name, costs_of_form in costs.items():
        run = {
            length: cost.seconds
            for length, cost in costs_of_form.items()
            if cost.seconds is not None
        }
        label = f"{name}: {LABELS[name]}"
        axes[0].loglog(list(run), list(run.values()), ".-", label=label)
        axes[1].loglog(
            list(costs_of_form), [cost.memory / 2**20 for cost in costs_of_form.values()], ".-"
        )
    for each, label in zip(
        axes, ("seconds, forward", "MiB beside arguments and results"), strict=True
    ):
        each.set_xscale("log", base=2)
        each.set(xlabel="tokens", ylabel=label)
        each.grid(alpha=0.25)
    axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    pyplot.close(fig)


LABELS = {
    "full": "all scores",
    "loop": "one diagonal at a time",
    "chunked": "overlapping chunks of 2w",
    "fused": "tiles, running softmax",
}


def main(options: Options) -> None:
    """Print the table and draw the figure, or run the races."""
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
    if options.against:
        turns = options.race_length, options.race_lengths, options.rounds
        race_both(options.torch_python, *turns, console)
        return
    if options.shortest % options.window or options.shortest < 2 * options.window:
        raise UserError(
            f"shortest {options.shortest}: chunks are of {options.window} tokens, two at least; "
            "give a multiple of it"
        )
    check()
    doublings = range(int(np.log2(options.longest / options.shortest)) + 1)
    lengths = [options.shortest * 2**each for each in doublings]
    costs = measured(options, lengths)
    console.print(table(costs, lengths))
    if options.figure:
        draw(costs, options.figure)


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except UserError as error:
        sys.exit(f"error: {error}")
