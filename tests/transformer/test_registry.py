"""The mixers of the package by name, and where their settings are."""

import importlib
import subprocess
import sys
from typing import get_type_hints

import pytest

import transformer
from transformer.registry import BUILTIN_MIXERS, MIXERS, MixerConfigRegistry, MixerRegistry


@pytest.mark.parametrize("kind", BUILTIN_MIXERS)
def test_the_table_says_what_the_module_registers(kind: str) -> None:
    mixer = MIXERS[kind]
    assert mixer.__module__ == BUILTIN_MIXERS[kind].module
    config = MIXERS.config_class(kind)
    assert get_type_hints(mixer)["config"] is config
    assert config.kind == kind
    # A table that knows the settings only, as before anything was imported, gives the same class.
    assert MixerRegistry().config_class(kind) is config


def test_every_name_of_the_package_is_found() -> None:
    for name in transformer.__all__:
        assert getattr(transformer, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = transformer.nothing


def test_settings_are_named_without_importing_what_computes() -> None:
    program = (
        "import sys\n"
        "from transformer.registry import MixerConfigRegistry\n"
        "from transformer import TransformerConfig\n"
        "TransformerConfig()\n"
        "configs = MixerConfigRegistry()\n"
        "assert len(set(configs.values())) == len(configs) > 20\n"
        "assert 'jax' not in sys.modules\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_mixer_of_ones_own_is_added_and_removed() -> None:
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


def test_settings_follow_a_mixer_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = MixerConfigRegistry()["identity"]
    monkeypatch.setitem(MIXERS, "identity", MIXERS["convolution"])
    assert MixerConfigRegistry()["identity"] is MixerConfigRegistry()["convolution"]
    monkeypatch.undo()
    assert MixerConfigRegistry()["identity"] is before


def test_settings_are_where_the_table_says() -> None:
    for home in BUILTIN_MIXERS.values():
        found = getattr(importlib.import_module(home.config_module), home.config_name)
        assert found.__module__ == home.config_module
