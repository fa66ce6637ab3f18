"""Facts about a compiled program, read from the text of its optimized HLO."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax

Shape = tuple[int, ...]


def program_of(function: Callable[..., Any], *arguments: Any) -> str:
    """The compiled function."""
    return jax.jit(function).lower(*arguments).compile().as_text() or ""


def shapes_in(program: str) -> set[Shape]:
    """The shapes of all its arrays, temporaries and what is within fused operations among them."""
    found = re.findall(r"\w+\[(\d+(?:,\d+)*)\]", program)
    return {tuple(int(size) for size in shape.split(",")) for shape in found}


def largest_array(function: Callable[..., Any], *arguments: Any) -> int:
    """Entries of the largest array of a compiled function."""
    return max(math.prod(shape) for shape in shapes_in(program_of(function, *arguments)))


def pairs_of_tokens(program: str, length: int) -> list[Shape]:
    """Return the shapes that may have an element for each pair of `length` tokens.

    In any layout: those with two axes as long as that or longer, as padded ones are, wherever they
    stand; and those with a quarter as many entries as there are pairs, such as a triangle of them,
    or all in tiles, or flat. Other sizes have to be chosen well below: 1 / 4 of the length for a
    token in all.
    """
    long = lambda shape: sum(size >= length for size in shape) > 1  # noqa: E731
    large = lambda shape: 4 * math.prod(shape) >= length**2  # noqa: E731
    return sorted(shape for shape in shapes_in(program) if long(shape) or large(shape))
