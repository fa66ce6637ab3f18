"""The contract of mixers as tests, public so that a mixer of your own gets them too.

    from transformer.testing import check_mixer

    check_mixer("full")                                # a name of MIXERS, as its defaults have it
    check_mixer(AttentionConfig(heads=5, kv_heads=1))  # or a configuration

Each ability that the mixer declares is tried on small random inputs in float32; each that it does
not declare has to be refused while the program is traced, by a ValueError of one line.
"""

from transformer.hardware import Hardware
from transformer.mixers import MixerConfig
from transformer.testing.abilities import (
    DEFAULT_LENGTHS,
    check_any_length,
    check_cached,
    check_causal,
    check_cross,
    check_segments,
    check_weights,
)
from transformer.testing.always import check_constants, check_dropout
from transformer.testing.refusals import check_rejected
from transformer.testing.select import SelectiveMixer, check_select
from transformer.testing.trial import Trial, default_config, make_trial

__all__ = [
    "ABILITY_CHECKS",
    "DEFAULT_LENGTHS",
    "SelectiveMixer",
    "Trial",
    "check_mixer",
    "make_trial",
]

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
