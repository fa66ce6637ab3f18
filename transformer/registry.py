"""Every mixer by its name, imported when it is asked for.

The settings of a model name its mixers, and can be read, listed and checked without importing what
computes them: `--help` of a configuration needs no JAX.
"""

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

if TYPE_CHECKING:
    from transformer.layer_configs import MixerConfig
    from transformer.mixers import Mixer


class BuiltinMixer(NamedTuple):
    """Where a mixer of this package is."""

    module: str
    """The module that registers it when it is imported."""
    config_name: str
    """The name of its configuration."""
    config_module: str
    """Where that is defined: a module that imports nothing that computes."""


_RECURRENT, _VARIANTS = "transformer.recurrent", "transformer.variants"

BUILTIN_MIXERS = {
    "full": BuiltinMixer(
        "transformer.attention", "AttentionConfig", "transformer.attention_config"
    ),
    "identity": BuiltinMixer("transformer.identity", "IdentityConfig", "transformer.layer_configs"),
    "convolution": BuiltinMixer(
        "transformer.convolution", "ConvolutionConfig", "transformer.layer_configs"
    ),
    **{
        kind: BuiltinMixer(f"{_RECURRENT}.{module}", config, f"{_RECURRENT}.configs")
        for kind, module, config in (
            ("elman", "elman", "ElmanConfig"),
            ("lstm", "lstm", "LSTMConfig"),
            ("bahdanau", "bahdanau", "BahdanauConfig"),
            ("luong", "luong", "LuongConfig"),
            ("cheng", "cheng", "ChengConfig"),
            ("seq2seq", "seq2seq", "Seq2SeqConfig"),
            ("gnmt_encoder", "gnmt_encoder", "GNMTEncoderConfig"),
            ("gnmt_decoder", "gnmt_decoder", "GNMTDecoderConfig"),
        )
    },
    **{
        kind: BuiltinMixer(f"{_VARIANTS}.{module}", config, f"{_VARIANTS}.configs")
        for kind, module, config in (
            ("bigbird", "bigbird", "BigBirdConfig"),
            ("linear", "linear_attention", "LinearAttentionConfig"),
            ("linformer", "linformer", "LinformerConfig"),
            ("longformer", "longformer", "LongformerConfig"),
            ("performer", "performer", "PerformerConfig"),
            ("primer", "primer", "PrimerConfig"),
            ("reformer", "reformer", "ReformerConfig"),
            ("routing", "routing_attention", "RoutingConfig"),
            ("sliding_window", "sliding_window", "SlidingWindowConfig"),
            ("sparse", "sparse", "SparseConfig"),
            ("top_k", "top_k", "TopKConfig"),
        )
    },
}
"""The mixers of this package by kind."""


class MixerRegistry(MutableMapping[str, "type[Mixer]"]):
    """Mixer classes by kind: those of this package are imported on first use."""

    def __init__(self) -> None:
        self._loaded: dict[str, type[Mixer]] = {}
        self._shipped = dict(BUILTIN_MIXERS)

    def __getitem__(self, kind: str) -> "type[Mixer]":
        if kind not in self._loaded and kind in self._shipped:
            importlib.import_module(self._shipped[kind].module)
        return self._loaded[kind]

    def __setitem__(self, kind: str, mixer: "type[Mixer]") -> None:
        self._loaded[kind] = mixer

    def __delitem__(self, kind: str) -> None:
        del self._loaded[kind]
        self._shipped.pop(kind, None)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._shipped, *self._loaded]))

    def __len__(self) -> int:
        return len(self._shipped.keys() | self._loaded.keys())

    def __contains__(self, kind: object) -> bool:
        return kind in self._shipped or kind in self._loaded

    def config_class(self, kind: str) -> "type[MixerConfig]":
        """Return the class of a mixer's configuration, without importing a mixer if possible."""
        if kind in self._loaded or kind not in self._shipped:
            found: type[MixerConfig] = get_type_hints(self[kind])["config"]
            return found
        home = self._shipped[kind]
        declared: Any = getattr(importlib.import_module(home.config_module), home.config_name)
        checked: type[MixerConfig] = declared
        return checked


MIXERS = MixerRegistry()
"""Every mixer by its `kind`. Add your own: `MIXERS["mine"] = MyMixer`."""


class MixerConfigRegistry(Mapping[str, "type[MixerConfig]"]):
    """Configurations of all mixers by kind, each imported when it is looked up."""

    def __getitem__(self, kind: str) -> "type[MixerConfig]":
        return MIXERS.config_class(kind)

    def __iter__(self) -> Iterator[str]:
        return iter(MIXERS)

    def __len__(self) -> int:
        return len(MIXERS)
