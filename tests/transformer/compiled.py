"""Read facts about a compiled program from the text of its optimized HLO."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax

Shape = tuple[int, ...]


def compiled_text(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the text of the compiled function."""
    return jax.jit(function).lower(*arguments).compile().as_text() or ""


def shapes_in(program: str) -> set[Shape]:
    """Return the shapes of all arrays of a program, including temporaries inside fused
    operations.
    """
    shapes = re.findall(r"\w+\[(\d+(?:,\d+)*)\]", program)
    return {tuple(int(size) for size in shape.split(",")) for shape in shapes}


def largest_array(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the number of entries of the largest array of a compiled function."""
    return max(math.prod(shape) for shape in shapes_in(compiled_text(function, *arguments)))


def quadratic_shapes(program: str, length: int) -> list[Shape]:
    """Return the shapes that may have an element for each pair of `length` tokens.

    These are shapes with two axes of at least `length` (more if padded), in any order, and those
    with at least a
    quarter of length^2 entries, such as a triangle, tiles or a flat array. All other sizes must be
    chosen well
    below: `length` / 4 entries per token in total.
    """
    long = lambda shape: sum(size >= length for size in shape) > 1  # noqa: E731
    large = lambda shape: 4 * math.prod(shape) >= length**2  # noqa: E731
    return sorted(shape for shape in shapes_in(program) if long(shape) or large(shape))
