"""Checks of registered parts, each under a kind of its own: mixers, optimizers, tasks."""

import dataclasses
import sys


def check_registration(part: str, kind: object, config: object) -> None:
    """Raise ValueError if settings cannot be saved: no frozen dataclass, or no kind of its own.

    Args:
      part: Word for the part in messages: "mixer", "optimizer".
      kind: Name to register, from the class attribute `kind` or the name of the class.
      config: Class of the settings.
    """
    if not isinstance(config, type):
        type_name = type(config).__name__
        raise ValueError(f"{part} of type {type_name}: is not a class; decorate or give a class")
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
