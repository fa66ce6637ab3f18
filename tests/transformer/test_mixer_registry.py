"""The built-in mixers by name, and the modules of their settings."""

import dataclasses
from typing import ClassVar, get_type_hints

import jax
import pytest

import transformer
from transformer import Abilities, Mixer, MixerOutput, register_mixer
from transformer.attention.attention_config import MixerConfig
from transformer.attention.mixer import MixerInputs
from transformer.mixer_registry import (
    BUILTIN_MIXERS,
    MIXERS,
    MixerConfigRegistry,
    MixerRegistry,
    check_kind_is_free,
    check_registration,
)


@pytest.mark.parametrize("kind", BUILTIN_MIXERS)
def test_table_matches_registered_mixers(kind: str) -> None:
    mixer = MIXERS[kind]
    assert mixer.__module__ == BUILTIN_MIXERS[kind].module
    config = MIXERS.config_class(kind)
    assert get_type_hints(mixer)["config"] is config
    assert config.kind == kind
    # A table with only the settings loaded, as before any import, gives the same class.
    assert MixerRegistry().config_class(kind) is config


def test_every_public_name_resolves() -> None:
    for name in transformer.__all__:
        assert getattr(transformer, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = transformer.nothing


def test_own_mixer_is_added_and_removed() -> None:
    mixers, full = MixerRegistry(), MIXERS["full"]
    mixers["mine"] = full
    assert mixers["mine"] is full
    assert mixers.config_class("mine") is MIXERS.config_class("full")
    assert set(mixers) == {*BUILTIN_MIXERS, "mine"}
    assert len(mixers) == len(BUILTIN_MIXERS) + 1
    assert mixers.pop("mine") is full
    assert "mine" not in mixers
    with pytest.raises(KeyError):
        _ = mixers["mine"]


def test_settings_follow_a_replaced_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    before = MixerConfigRegistry()["identity"]
    monkeypatch.setitem(MIXERS, "identity", MIXERS["convolution"])
    assert MixerConfigRegistry()["identity"] is MixerConfigRegistry()["convolution"]
    monkeypatch.undo()
    assert MixerConfigRegistry()["identity"] is before


def test_mixer_without_a_method_is_refused_when_it_is_registered() -> None:
    @dataclasses.dataclass(frozen=True)
    class HalfConfig(MixerConfig):
        kind: ClassVar[str] = "half"

    class Half(Mixer):
        config: HalfConfig

        @staticmethod
        def abilities(config: HalfConfig) -> Abilities:
            return Abilities()

        def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
            return MixerOutput(x, None, {})

    with pytest.raises(ValueError, match=r"Half: does not define constants, init_cache; define th"):
        register_mixer(Half)
    assert "half" not in MIXERS


@dataclasses.dataclass(frozen=True)
class OwnConfig(MixerConfig):
    kind: ClassVar[str] = "own"
    width: int = 2


@dataclasses.dataclass(frozen=True)
class KindFieldConfig:
    kind: str = "own"


class NoDataclassConfig(OwnConfig):
    pass


@pytest.mark.parametrize(
    ("kind", "config", "problem"),
    [
        ("own", KindFieldConfig, "cannot be called kind"),
        ("own", NoDataclassConfig, "is not a dataclass"),
        ("", OwnConfig, "has no kind"),
    ],
)
def test_settings_that_cannot_be_saved_are_not_registered(
    kind: str, config: type, problem: str
) -> None:
    check_registration("mixer", "own", OwnConfig)
    with pytest.raises(ValueError, match=problem):
        check_registration("mixer", kind, config)


def test_a_kind_belongs_to_one_class() -> None:
    check_kind_is_free("mixer", "own", OwnConfig, None)
    check_kind_is_free("mixer", "own", OwnConfig, OwnConfig)  # a notebook's cell runs again
    with pytest.raises(ValueError, match="own"):
        check_kind_is_free("mixer", "own", OwnConfig, KindFieldConfig)
