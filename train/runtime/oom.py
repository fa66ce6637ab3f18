"""Out-of-memory errors as one line with remedies."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import jax

from train.errors import UserError

LARGER_DEVICES_REMEDY = "use devices with more memory, or more of them"
"""Remedy for a trained run that is only evaluated or sampled: its size is fixed."""


@contextlib.contextmanager
def explain_oom(remedies: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Raise a UserError with remedies in place of an out-of-memory error.

    Args:
      remedies: Called after the error, to return the remedies to name.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_oom_error(error):
            raise
        raise UserError(oom_message(remedies(), str(error))) from error


def is_oom_error(error: BaseException) -> bool:
    """Return True if an error says that memory ran out."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or "RESOURCE_EXHAUSTED" in text
        or "out of memory" in text.lower()
    )


def oom_message(remedies: Sequence[str], message: str) -> str:
    """Return one line with the requested amount, if `message` names it, and the remedies."""
    # The compiler, the allocators of GPU and TPU, and the CPU client word it differently.
    amount = re.search(
        r"(?:allocat\w+|Used|requested)\D{0,40}(\d[\d.]* ?(?:[KMGT]i?B?|B|bytes)?)", message
    )
    requested = f" asking for {amount.group(1).strip()}" if amount else ""
    return f"memory: ran out{requested}; {', or '.join(remedies)}"
