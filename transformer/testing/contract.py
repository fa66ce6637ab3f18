"""What every mixer has to do, whatever it declares.

What a mixer does not declare, it has to refuse: a wrong result would be silent.

The contract of mixers as tests, public so that a mixer of your own gets them too.

    from transformer.testing import check_mixer

    check_mixer("full")                                # a name of MIXERS, as its defaults have it
    check_mixer(AttentionConfig(heads=5, kv_heads=1))  # or a configuration

Each ability that the mixer declares is tried on small random inputs in float32; each that it does
not declare has to be refused while the program is traced, by a ValueError of one line.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from transformer.attention.config import MixerConfig
from transformer.attention.masks import Mask, MaskPattern
from transformer.hardware import Hardware
from transformer.testing.abilities import (
    DEFAULT_LENGTHS,
    check_any_length,
    check_cached,
    check_causal,
    check_cross,
    check_segments,
    check_weights,
    pack_two_documents,
)
from transformer.testing.oracle import check_select
from transformer.testing.trial import BATCH_SIZE, Trial, default_config, make_trial


def check_constants(trial: Trial) -> None:
    """Constants of all layers have one shape, so that they stack."""
    mixer = trial.mixer
    made = [mixer.constants(mixer.config, layer, mixer.context.d_model) for layer in (0, 1)]
    trees = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each) for each in made]
    trial.require(trees[0] == trees[1], "constants", "differ in shape between layers")


def check_dropout(trial: Trial) -> None:
    """What is dropped follows from each example's own key, wherever it stands in a batch."""
    config, shared = trial.mixer.config, trial.mixer.context
    drops = hasattr(config, "dropout")
    if drops:
        mixer = type(trial.mixer)(dataclasses.replace(config, dropout=0.5), shared, parent=None)
        trial = dataclasses.replace(trial, mixer=mixer)
    x = trial.inputs(10, 17 if trial.abilities.any_length else 0)
    rngs, others = jax.random.split(jax.random.key(2), (2, BATCH_SIZE))
    y = trial(x, dropout_rngs=rngs).y
    trial.require(
        np.array_equal(trial(x, dropout_rngs=rngs).y, y), "dropout", "the same keys differ"
    )
    changed = not np.array_equal(trial(x, dropout_rngs=others).y, y)
    trial.require(changed == drops, "dropout", "other keys make no difference, or ought not to")
    rows = np.array([1, 2, 2])
    moved = trial(x[rows], dropout_rngs=rngs[rows]).y
    trial.require_close(moved, y[rows], "dropout", "the rest of the batch changes the result")


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


ABILITY_CHECKS = {
    "causal": check_causal,
    "cached": check_cached,
    "segments": check_segments,
    "cross": check_cross,
    "any_length": check_any_length,
    "weights": check_weights,
}
"""The check of each ability, by the name that `Abilities` gives it."""


def check_mixer(
    mixer: str | MixerConfig,
    *,
    d_model: int = 40,  # D
    length: int = 131,  # T of most checks
    lengths: tuple[int, ...] = DEFAULT_LENGTHS,
    hardware: Hardware = Hardware(),  # noqa: B008
) -> None:
    """Tries every declared ability of a mixer, and that it refuses each that it does not declare.

    A mixer that does not take every length is tried at `length`, which it has to take, and has to
    refuse one of `lengths` or more. One that has a method `select` is held to it, as `Selective`
    says. Raises AssertionError naming the ability that failed, and how; ValueError for a name that
    is not in MIXERS.
    """
    config = default_config(mixer) if isinstance(mixer, str) else mixer
    trial = make_trial(config, d_model, length, lengths, hardware)
    check_constants(trial)
    for ability, check in ABILITY_CHECKS.items():
        if getattr(trial.abilities, ability):
            check(trial)
        else:
            check_rejected(trial, ability)
    check_dropout(trial)
    if hasattr(trial.mixer, "select"):
        check_select(trial)
