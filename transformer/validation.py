"""Validation of configuration fields: each check raises a one-line ValueError."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

MAX_INTEGER = 2**31 - 1
"""Largest integer of a setting. Steps, positions and indices are int32 in XLA: larger numbers
overflow far from the setting, or exhaust memory while a model is built."""

MAX_MODEL_INTEGER = 2**24
"""Largest integer of a model's setting. Array sizes are products of several: XLA aborts the process
for more than 2^63 entries, which cannot be caught."""

MAX_INTEGER_BY_FIELD = {
    # One entry each in Python lists or host constants.
    "num_layers": 10_000,
    "transition_depth": 10_000,
    "ns_steps": 10_000,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "num_experts": 2**16,
    "beams": 2**16,
    "num_beams": 2**16,
    "num_hashes": 2**10,
    "kernel_size": 2**16,
    # Array dimensions that are multiplied.
    "head_dim": 2**20,
    "value_head_dim": 2**20,
    "sequence_length": 2**24,
    "max_length": 2**24,
    "tokens": 2**24,
    "max_new_tokens": 2**24,
    "extra_length": 2**24,
    # Sparse patterns and buckets built on the host.
    "random_block_span": 2**22,
    "block_size": 2**16,
    "num_global_blocks": 2**12,
    "num_window_blocks": 2**12,
    "num_random_blocks": 2**12,
    "num_buckets": 2**16,
    "max_buckets": 2**16,
    "shapes": 2**16,
    "max_depth": 500,
    "max_arguments": 2**16,
    # Table rows, padded to a multiple: their indices are int32.
    "vocab_size": 2**28,
    "pad_vocab_to_multiple": 2**20,
    "num_token_types": 2**28,
    "num_classes": 2**28,
    "num_labels": 2**28,
    # The index of a batch is int32, and each rollback adds `skip_batches` to it.
    "steps": 10**9,
    "skip_batches": 10**8,
    "rollback_steps": 10**9,
    # Sizes of files, and seeds of NumPy.
    "max_bytes": 2**63 - 1,
    "training_characters": 2**63 - 1,
    "seed": 2**32 - 1,
    "redraw_index": 2**32 - 1,
    "split_seed": 2**63 - 1,
    "generator_seed": 2**63 - 1,
}
"""Largest integer of settings with another limit, by the last part of their names."""

MAX_FLOAT = 2.0**127
"""Largest float of a setting: they are used in float32, where larger ones become infinite."""


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless the value is one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} {value}: is not known; give one of {', '.join(choices)}")


def check_number(name: str, value: float) -> None:
    """Raise ValueError for a number that is too large to compute with, or not finite.

    Args:
      name: Dotted name of the setting; its last part selects the limit of integers.
      value: An integer or a float.
    """
    if isinstance(value, int):
        default = MAX_MODEL_INTEGER if name.startswith("model.") else MAX_INTEGER
        limit = MAX_INTEGER_BY_FIELD.get(name.rpartition(".")[2], default)
        if abs(value) > limit:
            # Python refuses to print integers of more than 4300 digits.
            value_text = str(value) if abs(value) < 10**30 else "with more than 30 digits"
            raise ValueError(f"{name} {value_text}: is too large; give at most {limit}")
    elif not math.isfinite(value):
        raise ValueError(f"{name} {value}: is not a finite number; give one")
    elif abs(value) > MAX_FLOAT:
        raise ValueError(f"{name} {value}: is too large for float32; give less than 1e38")


def check_numbers(config: Any, name: str = "") -> None:
    """Apply `check_number` to every number in a configuration and its parts.

    Args:
      config: A dataclass, tuple or scalar; other values are ignored.
      name: Dotted name of the configuration, the prefix of its fields' names.
    """
    if isinstance(config, bool):
        return
    if isinstance(config, int | float):
        check_number(name, config)
    elif isinstance(config, tuple):
        for index, each in enumerate(config):
            check_numbers(each, f"{name}.{index}")
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        for field in dataclasses.fields(config):
            inner = f"{name}.{field.name}" if name else field.name
            check_numbers(getattr(config, field.name), inner)


def check_types(config: Any, name: str) -> None:
    """Raise ValueError unless every field of a dataclass, and of those inside, has its own type.

    Dataclasses do not check types, and a model only fails where it uses the value: a string in
    place of a `Precision` would be an AttributeError from inside.

    Args:
      config: The dataclass.
      name: Its dotted name, the prefix of its fields' names.
    """
    check_field_types(config, name)
    for field in dataclasses.fields(config):
        value, inner = getattr(config, field.name), f"{name}.{field.name}"
        for each in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(each) and not isinstance(each, type):
                check_types(each, inner)


def check_field_types(config: Any, name: str = "") -> None:
    """Apply `check_types` to the fields of a dataclass alone, and not to those inside."""
    config_class: Any = type(config)
    hints = _field_types(config_class)
    for field in dataclasses.fields(config):
        value, inner = getattr(config, field.name), f"{name}.{field.name}".lstrip(".")
        if field.name in hints and not _has_type(value, hints[field.name]):
            value_text = repr(value) if len(repr(value)) < 60 else type(value).__name__
            raise ValueError(f"{inner} {value_text}: {_type_remedy(value, hints[field.name])}")


@functools.cache
def _field_types(config_class: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields; {} if an annotation cannot be resolved."""
    try:
        return typing.get_type_hints(config_class)
    except NameError:  # a name that only type checkers import
        return {}


def _has_type(value: Any, annotation: Any) -> bool:
    """Return True unless the value clearly has another type than its annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments or any(isinstance(value, type(each)) for each in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        inner = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return len(inner) == len(value) and all(map(_has_type, value, inner))
    if annotation in (int, float):
        is_number = isinstance(value, int if annotation is int else int | float)
        return is_number and not isinstance(value, bool)
    if annotation is None:
        return value is None
    if not isinstance(annotation, type) or annotation is Any:
        return True
    try:
        return isinstance(value, annotation)
    except TypeError:  # a protocol, or a typed dict
        return True


def _type_remedy(value: Any, annotation: Any) -> str:
    """Return the problem with a value of the wrong type, and what to give instead."""
    if isinstance(value, type):
        return f"is a class; give an instance, such as {value.__name__}()"
    if get_origin(annotation) is Literal:
        return f"is of type {type(value).__name__}; give one of {', '.join(get_args(annotation))}"
    choices = [
        each
        for each in (get_args(annotation) or (annotation,))
        if isinstance(each, type) and each is not type(None)
    ]
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)[0]
        if get_origin(inner) is Literal:
            return f"is not a tuple of names; give some of {', '.join(get_args(inner))}"
        name = choices[0].__name__ if choices else str(inner)
        return f"is not a tuple of {name}; give ({name}(...),)"
    known = " or ".join(each.__name__ for each in choices)
    parse = next((each for each in choices if hasattr(each, "parse")), None)
    if isinstance(value, str) and parse is not None:
        return f"is a string; give {parse.__name__}.parse({value!r})"
    return f"is of type {type(value).__name__}; give {known}"


def check_integer(name: str, value: Any, minimum: int) -> None:
    """Raise ValueError unless the value is an integer of at least `minimum`."""
    is_scalar = getattr(value, "ndim", 0) == 0 and not isinstance(value, bool)
    if not is_scalar or not hasattr(value, "__index__"):
        raise ValueError(f"{name} {_shown(value)}: is not an integer; give {minimum} or more")
    check_at_least(name, int(value), minimum)


def check_size(name: str, value: Any, minimum: int) -> None:
    """Apply `check_integer` to the size of an axis, unless `jax.export` made it symbolic."""
    from jax.export import is_symbolic_dim  # settings are validated without JAX

    if not is_symbolic_dim(value):
        check_integer(name, value, minimum)


def check_instance(name: str, value: Any, expected_type: type) -> None:
    """Raise ValueError unless the value is an instance of a class."""
    if not isinstance(value, expected_type):
        raise ValueError(f"{name} of type {type(value).__name__}: give a {expected_type.__name__}")


def check_sequences(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a sequence, to be of token sequences."""
    if (
        isinstance(value, str | bytes)
        or not hasattr(value, "__len__")
        or not hasattr(value, "__iter__")
    ):
        raise ValueError(f"{name} of type {type(value).__name__}: give a list of token sequences")


def _shown(value: Any) -> str:
    """Return a value in a message: as it is if that is short, else its type."""
    text = repr(value)
    return text if len(text) < 60 and "\n" not in text else f"of type {type(value).__name__}"


def check_at_least(name: str, value: float, minimum: float) -> None:
    """Raise ValueError unless the value is a number of at least `minimum`, within limits."""
    if not isinstance(value, int | float):
        raise ValueError(f"{name} {_shown(value)}: is not a number; give {minimum} or more")
    if not value >= minimum:
        raise ValueError(f"{name} {value}: give {minimum} or more")
    check_number(name, value)


def check_fraction(name: str, value: float) -> None:
    """Raise ValueError unless the value is in [0, 1), such as a dropout rate."""
    if not isinstance(value, int | float):
        raise ValueError(f"{name} {_shown(value)}: is not a number; give a fraction in [0, 1)")
    if not 0 <= value < 1:
        raise ValueError(f"{name} {value}: give a fraction in [0, 1)")


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed out of [0, 2^32): `jax.random.key` would truncate it silently."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed}: give an integer from 0 to 2^32 - 1")
