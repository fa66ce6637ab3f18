"""Looking for checkpoints that are as they were saved; all hosts come to the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

_MOST = 1024  # numbers that hosts tell each other at once
_NOTHING = -1


class PassedOver(NamedTuple):
    """A checkpoint that is not to be used."""

    step: int
    why: str
    """In a few words; process 0 alone knows them."""


class Found(NamedTuple):
    """The outcome of a search."""

    step: int | None
    """The newest that is whole; None if none is."""
    passed_over: list[PassedOver]
    """Those newer than it, the newest first."""


def newest(steps: Iterable[int], problem: Callable[[int], str | None]) -> Found:
    """The newest of the steps with no problem, as process 0 sees it."""
    passed_over = []
    whole: list[int] = []
    if jax.process_index() == 0:
        for step in sorted(steps, reverse=True):
            why = problem(step)
            if why is None:
                whole.append(step)
                break
            passed_over.append(PassedOver(step, why))
    whole, others = told(whole), told([each.step for each in passed_over])
    if jax.process_index() != 0:
        passed_over = [PassedOver(step, "") for step in others]
    return Found(whole[0] if whole else None, passed_over)


def told(numbers: Sequence[int]) -> list[int]:
    """What process 0 has, on every process. Not from a thread beside training: it needs devices."""
    if jax.process_count() == 1:
        return list(numbers)
    padded = np.full(_MOST, _NOTHING, np.int32)
    padded[: len(numbers)] = numbers
    return [int(each) for each in ocp.multihost.broadcast_one_to_all(padded) if each != _NOTHING]
