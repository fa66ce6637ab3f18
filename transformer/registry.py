"""Every mixer by its name, imported when it is asked for.

The settings of a model name its mixers, and can be read, listed and checked without importing what
computes them: `--help` of a configuration needs no JAX.
"""

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

if TYPE_CHECKING:
    from transformer.attention.base import Mixer
    from transformer.attention.config import MixerConfig


class BuiltinMixer(NamedTuple):
    """Where a mixer of this package is."""

    module: str
    """The module that registers it when it is imported."""
    config_name: str
    """The name of its configuration."""
    config_module: str
    """Where that is defined: a module that imports nothing that computes."""


BUILTIN_MIXERS = {
    "full": BuiltinMixer(
        "transformer.attention.full", "AttentionConfig", "transformer.attention.config"
    ),
    "identity": BuiltinMixer(
        "transformer.baselines.bag", "IdentityConfig", "transformer.baselines.config"
    ),
    "convolution": BuiltinMixer(
        "transformer.baselines.convolution", "ConvolutionConfig", "transformer.baselines.config"
    ),
    "elman": BuiltinMixer(
        "transformer.baselines.elman", "ElmanConfig", "transformer.baselines.config"
    ),
    "lstm": BuiltinMixer(
        "transformer.baselines.lstm", "LSTMConfig", "transformer.baselines.config"
    ),
    "bahdanau": BuiltinMixer(
        "transformer.baselines.bahdanau", "BahdanauConfig", "transformer.baselines.config"
    ),
    "luong": BuiltinMixer(
        "transformer.baselines.luong", "LuongConfig", "transformer.baselines.config"
    ),
    "cheng": BuiltinMixer(
        "transformer.baselines.cheng", "ChengConfig", "transformer.baselines.config"
    ),
    "seq2seq": BuiltinMixer(
        "transformer.baselines.seq2seq", "Seq2SeqConfig", "transformer.baselines.config"
    ),
    "gnmt_encoder": BuiltinMixer(
        "transformer.baselines.gnmt", "GNMTEncoderConfig", "transformer.baselines.config"
    ),
    "gnmt_decoder": BuiltinMixer(
        "transformer.baselines.gnmt", "GNMTDecoderConfig", "transformer.baselines.config"
    ),
    "bigbird": BuiltinMixer(
        "transformer.attention.variants.bigbird",
        "BigBirdConfig",
        "transformer.attention.variants.sparse_configs",
    ),
    "linear": BuiltinMixer(
        "transformer.attention.variants.linear_attention",
        "LinearAttentionConfig",
        "transformer.attention.variants.kernel_configs",
    ),
    "linformer": BuiltinMixer(
        "transformer.attention.variants.linformer",
        "LinformerConfig",
        "transformer.attention.variants.kernel_configs",
    ),
    "longformer": BuiltinMixer(
        "transformer.attention.variants.longformer",
        "LongformerConfig",
        "transformer.attention.variants.sparse_configs",
    ),
    "performer": BuiltinMixer(
        "transformer.attention.variants.performer",
        "PerformerConfig",
        "transformer.attention.variants.kernel_configs",
    ),
    "primer": BuiltinMixer(
        "transformer.attention.variants.primer",
        "PrimerConfig",
        "transformer.attention.variants.kernel_configs",
    ),
    "reformer": BuiltinMixer(
        "transformer.attention.variants.reformer",
        "ReformerConfig",
        "transformer.attention.variants.clustered_configs",
    ),
    "routing": BuiltinMixer(
        "transformer.attention.variants.routing_attention",
        "RoutingAttentionConfig",
        "transformer.attention.variants.clustered_configs",
    ),
    "sliding_window": BuiltinMixer(
        "transformer.attention.variants.sliding_window",
        "SlidingWindowConfig",
        "transformer.attention.variants.sparse_configs",
    ),
    "sparse": BuiltinMixer(
        "transformer.attention.variants.sparse_transformer",
        "SparseTransformerConfig",
        "transformer.attention.variants.sparse_configs",
    ),
    "top_k": BuiltinMixer(
        "transformer.attention.variants.top_k",
        "TopKConfig",
        "transformer.attention.variants.clustered_configs",
    ),
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
