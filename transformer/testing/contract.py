"""Contract of mixers as tests. They are public, for mixers of your own.

    from transformer.testing import check_mixer

    check_mixer("full")                                        # a name of MIXERS, with defaults
    check_mixer(AttentionConfig(num_heads=5, num_kv_heads=1))  # or a configuration

Each ability that a mixer declares is tested on small random inputs in float32. Each that it does
not declare has to raise a ValueError of one line at trace time, as a wrong result would be silent.
Then the mixer is tried in bfloat16, and as part of a model (`whole_model.py`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from transformer.argument_checks import check_arguments
from transformer.attention.attention_config import MixerConfig
from transformer.attention.masks import Mask, MaskPattern
from transformer.hardware import Hardware
from transformer.testing.ability_checks import (
    DEFAULT_LENGTHS,
    check_any_length,
    check_cached,
    check_causal,
    check_cross,
    check_segments,
    check_weights,
    pack_two_documents,
)
from transformer.testing.mixer_under_test import (
    BATCH_SIZE,
    Trial,
    check_select,
    default_config,
    make_trial,
)
from transformer.testing.whole_model import check_bfloat16, check_in_model


def check_constants(trial: Trial) -> None:
    """Check that constants have the same shapes in all layers, so that they can be stacked."""
    mixer = trial.mixer
    per_layer = [mixer.constants(mixer.config, layer, mixer.context.d_model) for layer in (0, 1)]
    trees = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each) for each in per_layer]
    trial.require(trees[0] == trees[1], "constants", "differ in shape between layers")


def check_dropout(trial: Trial) -> None:
    """Check that dropout depends only on each example's own key, not on its place in the batch."""
    config, context = trial.mixer.config, trial.mixer.context
    has_dropout = hasattr(config, "dropout")
    if has_dropout:
        mixer = type(trial.mixer)(dataclasses.replace(config, dropout=0.5), context, parent=None)
        trial = dataclasses.replace(trial, mixer=mixer)
    x = trial.inputs(10, 17 if trial.abilities.any_length else 0)
    rngs, others = jax.random.split(jax.random.key(2), (2, BATCH_SIZE))
    y = trial(x, dropout_rngs=rngs).y
    trial.require(
        np.array_equal(trial(x, dropout_rngs=rngs).y, y),
        "dropout",
        "the same random keys give different results",
    )
    changed = not np.array_equal(trial(x, dropout_rngs=others).y, y)
    trial.require(
        changed == has_dropout,
        "dropout",
        "other random keys change nothing, or should change nothing and do",
    )
    # Rows are dropped and repeated, each with its own key: their results must move along.
    rows = np.array([1, 2, 2])
    permuted = trial(x[rows], dropout_rngs=rngs[rows]).y
    trial.require_close(permuted, y[rows], "dropout", "the rest of the batch changes the result")


def check_rejected(trial: Trial, ability: str) -> None:
    """Check that a call that needs the ability raises a ValueError of one line at trace time."""
    num_refused = 0
    for call in UNSUPPORTED_CALLS[ability](trial):
        try:
            call()
        except ValueError as error:
            one_line = bool(str(error)) and "\n" not in str(error)
            trial.require(one_line, ability, f"is rejected, but not in one line: {error}")
            num_refused += 1
    trial.require(num_refused, ability, "is neither declared nor rejected by a ValueError")


Calls = list[Callable[[], None]]


def _single_call(trial: Trial, **given: Any) -> Calls:
    return [functools.partial(trial.trace, trial.inputs(0), **given)]


def _cached_calls(trial: Trial) -> Calls:
    def decode() -> None:
        cache = trial.mixer.init_cache(BATCH_SIZE, trial.length)
        positions = np.arange(trial.length)[None].repeat(BATCH_SIZE, 0)
        trial.trace(trial.inputs(0), cache=cache, positions=positions)

    return [decode]


def _packed_calls(trial: Trial) -> Calls:
    segments, positions = pack_two_documents(trial.length)
    return _single_call(trial, segments=segments, positions=positions)


UNSUPPORTED_CALLS: dict[str, Callable[[Trial], Calls]] = {
    "causal": lambda trial: _single_call(trial, mask=Mask(MaskPattern(causal=True))),
    "cached": _cached_calls,
    "segments": _packed_calls,
    "cross": lambda trial: _single_call(trial, mask=Mask(), memory=trial.inputs(1)),
    "any_length": lambda trial: [
        functools.partial(trial.trace, trial.inputs(0, each)) for each in trial.lengths
    ],
    "weights": lambda trial: _single_call(trial, outputs=frozenset({"weights"})),
}
"""Calls that need each ability. At least one of them has to be refused."""


ABILITY_CHECKS = {
    "causal": check_causal,
    "cached": check_cached,
    "segments": check_segments,
    "cross": check_cross,
    "any_length": check_any_length,
    "weights": check_weights,
}
"""Check of each ability, by its name in `Abilities`."""


@check_arguments
def check_mixer(
    mixer: str | MixerConfig,
    *,
    d_model: int = 40,  # D
    length: int = 131,  # T of most checks
    lengths: tuple[int, ...] = DEFAULT_LENGTHS,
    hardware: Hardware = Hardware(),  # noqa: B008
) -> None:
    """Test every ability that a mixer declares, and that it refuses the others.

    Also tested: bfloat16, and a model of two layers with the mixer: scanned and unrolled, and one
    training step. Weights may be declared by `declare_weight`, `self.param` or layers of Flax.

    A mixer with a method `select` is also compared with softmax attention; see `SelectiveMixer`.

    Args:
      mixer: Name in `MIXERS`, or a configuration.
      d_model: Width of the inputs.
      length: Number of tokens in most checks. The mixer has to support it.
      lengths: Other lengths. Without the ability `any_length`, the mixer has to refuse one of them.
      hardware: Hardware of the model context; it selects backends.

    Raises:
      AssertionError: A check failed; the message names the mixer and the ability.
      ValueError: The name is not in `MIXERS`.
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
    check_bfloat16(trial)
    check_in_model(trial)
    if hasattr(trial.mixer, "select"):
        check_select(trial)
