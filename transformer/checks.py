"""What configurations check of their fields: each raises a ValueError of one line."""

from collections.abc import Iterable
from typing import Any


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """The value is one of those known."""
    known = tuple(known)
    if value not in known:
        raise ValueError(f"{name} {value}: is not known; give one of {', '.join(known)}")


def check_least(name: str, value: float, least: float) -> None:
    """The value is at least so much."""
    if not value >= least:
        raise ValueError(f"{name} {value}: give {least} or more")


def check_share(name: str, value: float) -> None:
    """The value is a share below one, such as a rate of dropout."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} {value}: give a share in [0, 1)")


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed of which `jax.random.key` would cut off bits: it takes 32."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed}: give one from 0 to 2^32 - 1")
