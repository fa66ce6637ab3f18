"""The program that draws initial weights: compiled as one, and quickly, because it runs once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from transformer.models.model import Model

INIT_OPTIMIZATION_LEVEL = 1
"""Level, from 0 to 3, to which XLA's CPU compiler optimizes the program."""


def init_compiler_options(platform: str) -> dict[str, Any] | None:
    """Return compiler options of a program that draws initial weights.

    On a CPU, most of the start of a short run would be LLVM optimizing the random numbers. With few
    of its passes the same values take a quarter of the time to compile, and little longer to draw
    (docs/performance.md).

    Args:
      platform: Name of the JAX backend: cpu, gpu or tpu.
    """
    # JAX's own setting asks for no optimization at all.
    if platform != "cpu" or jax.config.read("jax_disable_most_optimizations"):
        return None
    return {"xla_backend_optimization_level": INIT_OPTIMIZATION_LEVEL}


def draw_weights(model: Model, rng: jax.Array) -> Any:
    """Return initial parameters: a program of its own, or a part of the one that is being traced.

    Outside of a program each operation of `init` would be compiled alone, some hundred of them.
    """
    given: Any = rng  # what is no array is left to `init`, whose message says so
    alone = isinstance(given, jax.Array) and not isinstance(given, jax.core.Tracer)
    draw = _program(jax.default_backend()) if alone else _draw
    return draw(model, rng)


def _draw(model: Model, rng: jax.Array) -> Any:
    return model.init(rng, *map(jnp.zeros_like, model.example_inputs()))["params"]


@functools.cache
def _program(platform: str) -> Any:
    options = init_compiler_options(platform)
    return jax.jit(_draw, static_argnums=0, compiler_options=options)
