"""The mixers by name, and what is refused when one is registered."""

import dataclasses
from typing import ClassVar

import jax
import pytest

from transformer import Abilities, Mixer, MixerOutput, register_mixer
from transformer.attention.mixer import MIXERS, MixerConfig, MixerInputs, mixer_config_class
from transformer.registration import check_kind_is_free, check_registration


@pytest.mark.parametrize("kind", MIXERS)
def test_the_config_of_a_mixer_has_its_kind(kind: str) -> None:
    assert mixer_config_class(kind).kind == kind


def test_own_mixer_is_added_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "identity", MIXERS["convolution"])
    assert mixer_config_class("identity") is mixer_config_class("convolution")


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

    with pytest.raises(ValueError, match=r"Half: does not define init_cache; define it"):
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
