"""Registry of mixers by kind, each imported on first use, and registration of your own.

The configurations of mixers are in modules that import no JAX. So a model's settings can be read,
listed and checked without it, and `--help` is fast.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, get_type_hints

if TYPE_CHECKING:  # these import JAX
    from transformer.attention.attention_config import MixerConfig
    from transformer.attention.mixer import Mixer


class BuiltinMixer(NamedTuple):
    """Location of a mixer of this package."""

    module: str
    """Module that registers the mixer when it is imported."""
    config_name: str
    """Class of its configuration."""
    config_module: str
    """Module of that class."""


_ATTENTION, _VARIANTS = "transformer.attention", "transformer.attention.variants"
_BASELINES = "transformer.baselines"

BUILTIN_MIXERS = {
    "full": BuiltinMixer(f"{_ATTENTION}.full", "AttentionConfig", f"{_ATTENTION}.attention_config"),
    **{
        kind: BuiltinMixer(f"{_VARIANTS}.{module}", config_name, f"{_VARIANTS}.{config_module}")
        for kind, module, config_name, config_module in (
            ("bigbird", "bigbird", "BigBirdConfig", "bigbird"),
            ("linear", "linear_attention", "LinearAttentionConfig", "linear_configs"),
            ("linformer", "linformer", "LinformerConfig", "linear_configs"),
            ("longformer", "longformer", "LongformerConfig", "longformer"),
            ("performer", "performer", "PerformerConfig", "linear_configs"),
            ("primer", "primer", "PrimerConfig", "linear_configs"),
            ("reformer", "reformer", "ReformerConfig", "sparse_configs"),
            ("routing", "routing_attention", "RoutingAttentionConfig", "sparse_configs"),
            ("sliding_window", "sliding_window", "SlidingWindowConfig", "sliding_window"),
            ("sparse", "sparse_transformer", "SparseTransformerConfig", "sparse_transformer"),
            ("top_k", "top_k", "TopKConfig", "sparse_configs"),
        )
    },
    **{
        kind: BuiltinMixer(f"{_BASELINES}.{module}", config_name, f"{_BASELINES}.baseline_configs")
        for kind, module, config_name in (
            ("identity", "identity", "IdentityConfig"),
            ("convolution", "convolution", "ConvolutionConfig"),
            ("elman", "recurrent", "ElmanConfig"),
            ("lstm", "recurrent", "LSTMConfig"),
            ("bahdanau", "bahdanau", "BahdanauConfig"),
            ("luong", "luong", "LuongConfig"),
            ("cheng", "cheng", "ChengConfig"),
            ("seq2seq", "lstm_seq2seq", "Seq2SeqConfig"),
            ("gnmt_encoder", "gnmt", "GNMTEncoderConfig"),
            ("gnmt_decoder", "gnmt", "GNMTDecoderConfig"),
        )
    },
}
"""Mixers of this package by kind."""


class MixerError(ValueError):
    """A mixer does not support its inputs, or its code is wrong. The message names the mixer."""


class MixerRegistry(MutableMapping[str, "type[Mixer]"]):
    """Mapping from kind to mixer class, which imports built-in mixers on first use."""

    def __init__(self) -> None:
        self._loaded: dict[str, type[Mixer]] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._builtin = dict(BUILTIN_MIXERS)

    def __getitem__(self, kind: str) -> "type[Mixer]":
        if kind not in self._loaded and kind in self._builtin:
            importlib.import_module(self._builtin[kind].module)
        return self._loaded[kind]

    def __setitem__(self, kind: str, mixer: "type[Mixer]") -> None:
        self._loaded[kind] = mixer
        self._notify()

    def __delitem__(self, kind: str) -> None:
        del self._loaded[kind]
        self._builtin.pop(kind, None)
        self._notify()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._builtin, *self._loaded]))

    def __len__(self) -> int:
        return len(self._builtin.keys() | self._loaded.keys())

    def __contains__(self, kind: object) -> bool:
        return kind in self._builtin or kind in self._loaded

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each change, to clear what was cached about the mixers."""
        self._callbacks.append(callback)

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()

    def config_class(self, kind: str) -> "type[MixerConfig]":
        """Return the configuration class of a mixer; for a built-in one, without importing it."""
        if kind in self._loaded or kind not in self._builtin:
            # The annotation of the field `config`: a mixer of the user, or one that replaces ours.
            annotated: type[MixerConfig] = get_type_hints(self[kind])["config"]
            return annotated
        builtin = self._builtin[kind]
        config_module = importlib.import_module(builtin.config_module)
        config_class: Any = getattr(config_module, builtin.config_name)
        return cast("type[MixerConfig]", config_class)


MIXERS = MixerRegistry()
"""All mixers by kind. Register your own with `register_mixer`; `del MIXERS["mine"]` removes it."""

MixerClass = TypeVar("MixerClass", bound="type[Mixer]")
"""Type variable: a mixer class, which a decorator returns as it is."""


def register_mixer(mixer: MixerClass) -> MixerClass:
    """Register a mixer under the `kind` of its configuration. A class decorator.

    Example::

        @register_mixer
        class Sharp(Mixer):
            config: SharpConfig

    Raises:
      ValueError: The mixer has no configuration class or lacks a method, or its kind belongs to
        another mixer.
    """
    from transformer.attention.attention_config import MixerConfig

    check_is_class("mixer", mixer)
    config = get_type_hints(mixer).get("config")
    if not isinstance(config, type) or not issubclass(config, MixerConfig):
        raise ValueError(
            f"mixer {mixer.__qualname__}: has no configuration class; annotate `config` with a "
            "frozen dataclass derived from MixerConfig"
        )
    if missing := sorted(getattr(mixer, "__abstractmethods__", ())):
        raise ValueError(
            f"mixer {mixer.__qualname__}: does not define {', '.join(missing)}; define "
            f"{'it' if len(missing) == 1 else 'them'}, as docs/attention.md shows"
        )
    kind = getattr(config, "kind", None)
    check_registration("mixer", kind, config)
    check_kind_is_free("mixer", config.kind, mixer, MIXERS.get(config.kind))
    MIXERS[config.kind] = mixer
    return mixer


def check_is_class(part: str, value: object) -> None:
    """Raise ValueError unless the value is a class."""
    if not isinstance(value, type):
        type_name = type(value).__name__
        raise ValueError(f"{part} of type {type_name}: is not a class; decorate or give a class")


def check_registration(part: str, kind: object, config: type) -> None:
    """Raise ValueError if settings cannot be saved: no frozen dataclass, or no kind of its own.

    Args:
      part: Word for the part in messages: "mixer", "optimizer".
      kind: Name to register, from the class attribute `kind` or the name of the class.
      config: Class of the settings.
    """
    check_is_class(part, config)
    if not isinstance(kind, str) or not kind:
        raise ValueError(
            f'{part} {config.__qualname__}: has no kind; add `kind: ClassVar[str] = "mine"`'
        )
    if not dataclasses.is_dataclass(config) or "__dataclass_params__" not in vars(config):
        raise ValueError(
            f"{part} {kind}: {config.__qualname__} is not a dataclass; add "
            "@dataclasses.dataclass(frozen=True)"
        )
    if any(field.name == "kind" for field in dataclasses.fields(config)):
        raise ValueError(
            f"{part} {kind}: a setting cannot be called kind, which names the class; rename it, or "
            "annotate kind as ClassVar[str]"
        )


def check_kind_is_free(part: str, kind: str, new: type, old: type | None) -> None:
    """Raise ValueError if a kind belongs to another class.

    A class of the same name from the same file replaces the old one: a notebook cell, or a config
    file that was imported before, is executed again.
    """
    if old is not None and _origin(new) != _origin(old):
        raise ValueError(
            f"{part} {kind}: is the kind of {old.__module__}.{old.__qualname__}; choose another"
        )


def _origin(part: type) -> tuple[str, str]:
    """Return the file, or else the module, and the name of a class."""
    module = sys.modules.get(part.__module__)
    return getattr(module, "__file__", None) or part.__module__, part.__qualname__


class MixerConfigRegistry(Mapping[str, "type[MixerConfig]"]):
    """Mapping from kind to configuration class of all mixers, each imported on lookup."""

    def __getitem__(self, kind: str) -> "type[MixerConfig]":
        return MIXERS.config_class(kind)

    def __iter__(self) -> Iterator[str]:
        return iter(MIXERS)

    def __len__(self) -> int:
        return len(MIXERS)
