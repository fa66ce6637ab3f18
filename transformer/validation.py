"""Checks at the doors: settings when they are built, and arrays that public functions receive.

Types, bounds and marks of a setting are written at its field:

    @dataclasses.dataclass(frozen=True)
    class MultiHeadConfig(Settings):
        num_heads: Annotated[PositiveInt, Mark.COMMON] = 8
        dropout: Fraction = 0.0

Each check raises ValueError with one line: the name, what is wrong, and what to give.
"""

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import chex
import jax
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Int

MAX_INTEGER = 2**31 - 1
"""Largest integer of a setting without bounds of its own. Steps, positions and indices are int32 in
XLA: larger numbers overflow far from the setting."""

MAX_FLOAT = 2.0**127
"""Largest float of a setting: they are used in float32, where larger ones become infinite."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Range of a number: `Annotated[int, Bounds(1, 2**16)]`."""

    minimum: float = -math.inf
    """Smallest number. Without one: -MAX_INTEGER, or -MAX_FLOAT."""
    maximum: float | None = None
    """Largest number. None: MAX_INTEGER, or MAX_FLOAT."""
    below: float = math.inf
    """Exclusive upper bound."""
    above: float = -math.inf
    """Exclusive lower bound."""

    def problem(self, value: float) -> str:
        """Return what to give in place of a number out of range; empty if it is within."""
        if value < self.minimum:
            return f"give {self.minimum} or more"
        if self.maximum is not None and value > self.maximum:
            return f"is too large; give at most {self.maximum}"
        if value <= self.above:
            return f"give more than {self.above}"
        return f"give less than {self.below}" if value >= self.below else ""


NonNegativeInt = Annotated[int, Bounds(0)]
PositiveInt = Annotated[int, Bounds(1)]
NonNegativeFloat = Annotated[float, Bounds(0)]
PositiveFloat = Annotated[float, Bounds(above=0)]
Fraction = Annotated[float, Bounds(0, below=1)]
"""A number in [0, 1), such as a dropout rate."""
Seed = Annotated[int, Bounds(0, 2**32 - 1)]
"""Seed of NumPy or of `jax.random.key`, which truncates a larger one silently."""


class Mark(enum.Enum):
    """What is true of a setting, or of all settings of a part: `Annotated[int, Mark.COMMON]`."""

    COMMON = enum.auto()
    """The short help of the command line shows it: many people change it."""
    RESUMABLE = enum.auto()
    """It may change when a run is resumed. The new value holds from there on."""
    SWITCHES_STATE = enum.auto()
    """A training state has other arrays with 0 than with other numbers: no resume changes it from
    or to 0."""


class Settings:
    """Base of frozen dataclasses of settings: fields are checked against their annotations.

    Messages name a field by its class, or by the part that it belongs to in all settings of a run:
    `class MeshConfig(Settings, part="mesh")`.
    """

    _part = ""

    def __init_subclass__(cls, part: str = "", **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls._part = part or cls._part

    def __post_init__(self) -> None:
        check_settings(self, self._part or None)


def check_settings(settings: Any, name: str | None = None) -> None:
    """Raise ValueError unless every field of a dataclass has its type and is within its bounds.

    Args:
      settings: The dataclass. Settings inside it were checked when they were built.
      name: Prefix of the names of its fields; None: its class.
    """
    prefix = type(settings).__name__ if name is None else name
    for field, annotation in _annotations(settings.__class__).items():
        value = getattr(settings, field)
        if problem := _problem(value, annotation):
            raise ValueError(f"{prefix}.{field} {_shown(value)}: {problem}".lstrip("."))


def check_nested_settings(settings: Any, name: str | None = None) -> None:
    """Apply `check_settings` to a dataclass and all settings inside, under their dotted names.

    Classes of users may define `__post_init__` without the checks of `Settings`.
    """
    check_settings(settings, name)
    prefix = type(settings).__name__ if name is None else name
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        inner = f"{prefix}.{field.name}".lstrip(".")
        if isinstance(value, tuple):
            parts = [(f"{inner}.{index}", part) for index, part in enumerate(value)]
        else:
            parts = [(inner, value)]
        for part_name, part in parts:
            if dataclasses.is_dataclass(part) and not isinstance(part, type):
                check_nested_settings(part, part_name)


def field_marks(settings_class: type) -> dict[str, frozenset[Mark]]:
    """Return the marks of each field of a dataclass."""
    return {
        name: frozenset(each for each in get_args(annotation)[1:] if isinstance(each, Mark))
        if get_origin(annotation) is Annotated
        else frozenset()
        for name, annotation in _annotations(settings_class).items()
    }


@functools.cache
def _annotations(settings_class: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields; {} if one cannot be resolved."""
    try:
        hints = typing.get_type_hints(settings_class, include_extras=True)
    except NameError:  # a name of a function's scope
        return {}
    names = [field.name for field in dataclasses.fields(settings_class)]
    return {name: hints[name] for name in names if name in hints}


def _problem(value: Any, annotation: Any) -> str:
    """Return what is wrong with a value, and what to give; empty if it fits the annotation."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    bounds = Bounds()
    if origin is Annotated:
        annotation, *metadata = arguments
        bounds = next((entry for entry in metadata if isinstance(entry, Bounds)), bounds)
        origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        problems = [_problem(value, alternative) for alternative in arguments]
        # The problem of the alternative that has the value's type, if there is one.
        out_of_bounds = [text for text in problems if "is of type" not in text]
        return "" if "" in problems else [*out_of_bounds, _type_remedy(value, arguments)][0]
    if origin is tuple and isinstance(value, tuple):
        inner = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        if len(inner) != len(value):
            return f"has {len(value)} entries; give {len(inner)}"
        return next(filter(None, map(_problem, value, inner)), "")
    if problem := _type_problem(value, annotation):
        return problem
    if origin is Literal:
        known = ", ".join(map(str, arguments))
        return "" if value in arguments else f"is not known; give one of {known}"
    if annotation not in (int, float):
        return ""
    # Python cannot convert an integer of hundreds of digits to a float.
    if isinstance(value, float) and not math.isfinite(value):
        return "is not a finite number; give one"
    limit = MAX_INTEGER if annotation is int else MAX_FLOAT
    # A maximum at the field replaces the usual limit: seeds of 64 bits are used on the host alone.
    maximum = limit if bounds.maximum is None else bounds.maximum
    return bounds.problem(value) or Bounds(-limit, maximum).problem(value)


def _type_problem(value: Any, annotation: Any) -> str:
    """Return what is wrong with the type of a value; empty if it may be right."""
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        fits = any(isinstance(value, type(choice)) for choice in get_args(annotation))
    elif annotation in (int, float):
        fits = isinstance(value, int if annotation is int else int | float)
        fits &= not isinstance(value, bool)
    elif annotation is None or annotation is type(None):
        fits = value is None
    elif isinstance(origin, type) and origin is not Any:
        try:
            fits = isinstance(value, origin)
        except TypeError:  # a protocol, or a typed dict
            fits = True
    else:
        fits = True
    return "" if fits else _type_remedy(value, (annotation,))


def _type_remedy(value: Any, choices: tuple[Any, ...]) -> str:
    if isinstance(value, type):
        return f"is a class; give an instance, such as {value.__name__}()"
    names = [getattr(get_origin(c) or c, "__name__", str(c)) for c in choices]
    return f"is of type {type(value).__name__}; give {' or '.join(names)}"


def _shown(value: Any) -> str:
    """Return a value in a message: as it is if that is short, else its type."""
    # Python refuses to print integers of more than 4300 digits.
    if isinstance(value, int) and abs(value) >= 10**30:
        return "with more than 30 digits"
    text = repr(value) if not isinstance(value, str) else value
    return text if len(text) < 60 and "\n" not in text else f"of type {type(value).__name__}"


def check_integer(name: str, value: Any, minimum: int) -> None:
    """Raise ValueError unless an argument is an integer of at least `minimum`, or symbolic."""
    if is_symbolic_dim(value):
        return
    is_scalar = getattr(value, "ndim", 0) == 0 and not isinstance(value, bool)
    if not is_scalar or not hasattr(value, "__index__"):
        raise ValueError(f"{name} {_shown(value)}: is not an integer; give {minimum} or more")
    if problem := Bounds(minimum, MAX_INTEGER).problem(int(value)):
        raise ValueError(f"{name} {_shown(int(value))}: {problem}")


def check_shapes(sizes: Mapping[str, int] | None = None, /, **arrays: Any) -> None:
    """Raise ValueError unless arrays have these axes and dtypes; equal letters have equal sizes.

        check_shapes(q=(q, "B T N H", float), positions=(positions, "B? T | None", int))

    A letter is bound to its size in `sizes`, else in the first array that has it; `B?` also accepts
    size 1, which broadcasts; `...` is any axes. A traced program keeps nothing of the checks.

    Args:
      sizes: Sizes by letter.
      arrays: By name: the array, the letters of its axes, and the kinds of dtypes that it may have
        (none: any).
    """
    bound: dict[str, int] = dict(sizes or {})
    for name, (array, axes, *kinds) in arrays.items():
        if array is None and axes.endswith("| None"):
            continue
        letters = axes.removesuffix("| None").split()
        if not hasattr(array, "shape"):
            kind = type(array).__name__
            raise ValueError(f"{name} of type {kind}: give an array [{', '.join(letters)}]")
        if "..." in letters:
            leading = bound.setdefault("...", array.ndim + 1 - len(letters))
            letters = [*(f"axis {axis}" for axis in range(leading)), *letters[1:]]
        for letter, size in zip(letters, array.shape, strict=False):
            if not (letter.endswith("?") and size == 1):
                bound.setdefault(letter.removesuffix("?"), size)
        expected = [
            {1, bound.get(letter[:-1], 1)} if letter.endswith("?") else bound.get(letter, 0)
            for letter in letters
        ]
        try:
            chex.assert_shape(array, expected)
            if kinds:
                chex.assert_type(array, bool if bool in kinds and array.dtype == bool else kinds[0])
        except AssertionError:
            names = [letter.removesuffix("?") for letter in letters]
            known = [f"{letter} = {bound[letter]}" for letter in names if letter in bound]
            dtypes = f" of {' or '.join(kind.__name__ for kind in kinds)}" if kinds else ""
            raise ValueError(
                f"{name} of shape {array.shape}, {array.dtype}: give [{', '.join(names)}]{dtypes}"
                + (f", where {', '.join(known)}" if known else "")
            ) from None


def may_be_below(indices: Any, limit: int, minimum: int = 0) -> bool:
    """Return False if an index is known to lie outside of [minimum, limit); traced ones are not."""
    if isinstance(indices, jax.core.Tracer) or not getattr(indices, "is_fully_addressable", True):
        return True
    values = np.asarray(indices)  # by NumPy, which computes while JAX traces
    return not values.size or bool(values.min() >= minimum and values.max() < limit)


def check_token_ids(
    name: str,
    tokens: Any,  # integers of any shape
    vocab_size: int,
    num_rows: int = 0,  # of the table that they index
) -> None:
    """Raise ValueError for tokens outside of a vocabulary, and dtypes that cannot index its table.

    Values of traced arrays are not known, and not checked.
    """
    # Unsigned indices work at any width; for signed ones JAX computes index + rows in their dtype.
    if tokens.dtype.kind == "i" and np.iinfo(tokens.dtype).max < num_rows:
        raise ValueError(
            f"{name} of dtype {tokens.dtype}: cannot index {num_rows:,} rows; give int32"
        )
    if not may_be_below(tokens, vocab_size):
        ids = np.asarray(tokens)
        wrong = next(token for token in (ids.min(), ids.max()) if not 0 <= token < vocab_size)
        raise ValueError(
            f"{name}: {wrong} is not one of the model's {vocab_size:,}; use the tokenizer that it "
            "was trained with"
        )


def check_positions(
    inputs: str,  # name of the inputs, in messages
    length: int,  # T
    positions: Int[Array, "#B T"] | None,  # -1: padding
    limit: int | None,  # rows of the table of learned positions; None: there is none
) -> None:
    """Raise ValueError if inputs or their positions exceed a table of learned positions."""
    if limit is None:
        return
    if length > limit:
        raise ValueError(
            f"{length} {inputs}: the table of learned positions has {limit} rows; give shorter "
            "inputs or a longer table"
        )
    if positions is not None and not may_be_below(positions, limit, minimum=-1):
        values = np.asarray(positions)
        wrong = values.min() if values.min() < -1 else values.max()
        raise ValueError(
            f"position {wrong}: the table of learned positions has {limit} rows, from 0; give "
            f"positions below {limit}, or a longer table"
        )


def check_segments(name: str, segments: jax.Array | None) -> None:
    """Raise ValueError for negative segments, and for those that are padding throughout.

    Segments counted from 0 cannot be told from padding on the left.
    """
    if segments is None or may_be_below(segments, 0):  # traced, or empty
        return
    values = np.asarray(segments)
    if values.min() < 0:
        raise ValueError(
            f"{name}: {values.min()} is not a document; number documents from 1, padding is 0"
        )
    if not values.any():
        raise ValueError(f"{name}: are all 0, which is padding; number documents from 1")


def check_token_sequence(
    name: str,
    tokens: Any,  # [T] a list or an array
    vocab_size: int,
    if_empty: str = "give it at least one token",
) -> None:
    """Raise ValueError unless this is a sequence of one or more tokens of a vocabulary."""
    row = np.asarray(tokens)
    if row.ndim == 1 and not row.size:
        raise ValueError(f"{name}: is empty; {if_empty}")
    check_shapes(**{name: (row, "T", int)})
    check_token_ids(name, row, vocab_size)


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that `jax.random.key` would truncate silently."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed}: give an integer from 0 to 2^32 - 1")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError unless a setting is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} {value}: is not known; give one of {', '.join(choices)}")


def check_at_least(name: str, value: Any, minimum: float) -> None:
    """Raise ValueError unless a setting is a finite number of at least `minimum`."""
    if problem := _problem(value, Annotated[float, Bounds(minimum)]):
        raise ValueError(f"{name} {_shown(value)}: {problem}")
