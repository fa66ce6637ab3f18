"""Time of activations and of their gradients, in the forms that a GPU gets and in JAX's own.

    python -m bench.activation_cost [--rows 32768] [--width 3072]

Each program adds a bias first, as a feed-forward layer does, reads x (and dy) and writes one array:
ReLU shows what the memory alone takes.
"""

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from bench.machine import machine
from transformer.layers.activations import ACTIVATIONS, FORMS_ON_GPU


@dataclasses.dataclass(frozen=True)
class Options:
    """Time the activations."""

    rows: int = 32_768
    width: int = 3072
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    repeats: int = 50
    """Runs in a round; the median of five rounds is shown."""


def main(options: Options) -> None:
    """Print a table in microseconds."""
    forms = ACTIVATIONS | {f"{name}, on a GPU": form for name, form in FORMS_ON_GPU.items()}
    shape = (options.rows, options.width)
    x, dy = (jax.random.normal(jax.random.key(n), shape, options.precision) for n in (0, 1))
    bias = jnp.ones((1, options.width), options.precision)
    table = Table("activation", "forward, µs", "gradient, µs", box=None)
    for name, form in forms.items():
        times = (
            timed(forward(form), options, x, bias),
            timed(gradient(form), options, x, bias, dy),
        )
        table.add_row(name, *(f"{each * 1e6:,.0f}" for each in times))
    console = Console(width=120)
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))
    console.print(table)


def forward(form: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Return x, bias -> activation(x + bias), compiled."""
    return jax.jit(lambda x, bias: form(x + bias))


def gradient(form: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Return x, bias, dy -> the gradient in x, compiled."""
    return jax.jit(lambda x, bias, dy: jax.vjp(lambda x: form(x + bias), x)[1](dy)[0])


def timed(program: Callable[..., jax.Array], options: Options, *arrays: jax.Array) -> float:
    """Return the median seconds of a run."""
    jax.block_until_ready(program(*arrays))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(options.repeats - 1):
            program(*arrays)
        jax.block_until_ready(program(*arrays))
        times.append((time.perf_counter() - start) / options.repeats)
    return median(times)


if __name__ == "__main__":
    main(tyro.cli(Options))
