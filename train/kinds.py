"""Settings that may be one of several classes, which `kind` names.

They are the unions of configurations (positions, optimizers, tasks, ...), and the mixers, to which
users add their own.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

from transformer.layer_configs import MixerConfig
from transformer.registry import MixerConfigRegistry


def classes_by_kind(hint: Any) -> Mapping[str, type]:
    """The classes that a setting with this type hint may be, by name; none if there is no choice.

    A union with None, or a mixer with None, has the same: None has no name.
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    classes = [each for each in members if isinstance(each, type)]
    if any(issubclass(each, MixerConfig) for each in classes):
        return MixerConfigRegistry()
    configs = [each for each in classes if dataclasses.is_dataclass(each)]
    return {kind_name(each): each for each in configs} if len(configs) > 1 else {}


def kind_name(config: type) -> str:
    """What a class is called: its `kind`, or its own name."""
    settings = {field.name for field in dataclasses.fields(config)}
    named = None if "kind" in settings else getattr(config, "kind", None)
    return named or config.__name__
