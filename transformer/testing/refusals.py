"""What a mixer does not declare, it has to refuse: a wrong result would be silent."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from transformer.masks import Mask, MaskPattern
from transformer.testing.abilities import pack_two_documents
from transformer.testing.trial import BATCH_SIZE, Trial


def check_rejected(trial: Trial, ability: str) -> None:
    """What needs the ability raises a ValueError of one line while it is traced."""
    refused = 0
    for attempt in UNSUPPORTED_CALLS[ability](trial):
        try:
            attempt()
        except ValueError as error:
            one_line = bool(str(error)) and "\n" not in str(error)
            trial.require(one_line, ability, f"is refused, but not in one line: {error}")
            refused += 1
    trial.require(refused, ability, "is not declared, and not refused by a ValueError either")


Calls = list[Callable[[], None]]


def _one(trial: Trial, **given: Any) -> Calls:
    return [functools.partial(trial.trace, trial.inputs(0), **given)]


def _cached(trial: Trial) -> Calls:
    def decode() -> None:
        cache = trial.mixer.init_cache(BATCH_SIZE, trial.length)
        positions = np.arange(trial.length)[None].repeat(BATCH_SIZE, 0)
        trial.trace(trial.inputs(0), cache=cache, positions=positions)

    return [decode]


def _packed(trial: Trial) -> Calls:
    segments, positions = pack_two_documents(trial.length)
    return _one(trial, segments=segments, positions=positions)


UNSUPPORTED_CALLS: dict[str, Callable[[Trial], Calls]] = {
    "causal": lambda trial: _one(trial, mask=Mask(MaskPattern(causal=True))),
    "cached": _cached,
    "segments": _packed,
    "cross": lambda trial: _one(trial, mask=Mask(), memory=trial.inputs(1)),
    "any_length": lambda trial: [
        functools.partial(trial.trace, trial.inputs(0, each)) for each in trial.lengths
    ],
    "weights": lambda trial: _one(trial, outputs=frozenset({"weights"})),
}
"""What needs each ability; of several attempts, one has to be refused."""
