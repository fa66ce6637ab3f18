"""What can be read in a compiled program."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax


def largest_array(function: Callable[..., Any], *arguments: Any) -> int:
    """Entries of the largest array of a compiled function, temporaries among them."""
    program = jax.jit(function).lower(*arguments).compile().as_text() or ""
    sizes = re.findall(r"\[(\d[\d,]*)\]", program)
    return max(math.prod(map(int, dims.split(","))) for dims in sizes)
