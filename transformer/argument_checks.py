"""Check of a function's arguments against its annotations: wrong types are one-line errors.

Python does not check annotations, and JAX reports a wrong argument where it is used: an
AttributeError from inside names neither the function's argument nor the remedy.

    @check_arguments
    def zero_heads(layer: int | jax.Array, heads: Indices) -> Edit: ...
"""

import collections.abc
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")

CONTAINERS = (
    collections.abc.Iterable,
    collections.abc.Collection,
    collections.abc.Sequence,
    tuple,
    list,
)


def check_arguments(function: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    """Return the function, which raises ValueError for arguments of other types than annotated.

    Annotations with a known meaning are checked: arrays, numbers, strings, literals, functions,
    containers (not their elements), and classes. A class that only type checkers import is known
    by its name. Shapes and dtypes remain for `check_shapes`.
    """
    signature = inspect.signature(function)

    @functools.cache
    def annotations() -> dict[str, tuple[Any, ...]]:
        return {
            name: tuple(_alternatives(parameter.annotation, function))
            for name, parameter in signature.parameters.items()
            if parameter.annotation is not parameter.empty
        }

    @functools.wraps(function)
    def call(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Result:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            choices = annotations().get(name, (Any,))
            if not any(_matches(value, choice) for choice in choices):
                raise ValueError(f"{name} {_shown(value)}: give {_describe(choices)}")
        return function(*args, **kwargs)

    return call


def _alternatives(annotation: Any, function: Callable[..., Any]) -> Iterator[Any]:
    """Return the members of a union, or the annotation alone; names are looked up."""
    if isinstance(annotation, str):
        for part in annotation.split(" | "):
            try:
                yield from _alternatives(eval(part, function.__globals__), function)
            except NameError:
                yield part
    elif get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _alternatives(each, function)
    else:
        yield None if annotation is type(None) else annotation


def _matches(value: Any, annotation: Any) -> bool:
    """Return False if the value clearly has another type than its annotation."""
    origin = get_origin(annotation) or annotation
    if annotation is Any:
        return True
    if _is_array_type(annotation):
        return hasattr(value, "shape") and getattr(value.dtype, "kind", "V") not in "USO"
    if isinstance(annotation, str):
        return annotation in [each.__name__ for each in type(value).__mro__]
    if annotation is None:
        return value is None
    if origin is Literal:
        return isinstance(value, str) and value in get_args(annotation)
    if origin is int:
        return _is_integer(value)
    if origin is float:
        return _is_integer(value) or isinstance(value, float) or _is_scalar(value, "f")
    if origin is collections.abc.Callable:
        return callable(value)
    if origin in CONTAINERS:
        return isinstance(value, collections.abc.Iterable) and not isinstance(value, str | bytes)
    return not isinstance(origin, type) or isinstance(value, origin)


def _is_array_type(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation == "jax.Array"
    name = annotation.__name__ if isinstance(annotation, type) else ""
    return name.rpartition(".")[2] in ("Array", "ndarray")  # JAX's includes its module


def _is_integer(value: Any) -> bool:
    """Return True for integers of Python, NumPy and JAX, and for symbolic sizes."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or _is_scalar(value, "iu") or _is_symbolic(value)


def _is_scalar(value: Any, kinds: str) -> bool:
    return getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "V") in kinds


def _is_symbolic(value: Any) -> bool:
    from jax.export import is_symbolic_dim

    return is_symbolic_dim(value)


def _shown(value: Any) -> str:
    """Return a value in a message: as it is if it is short, else its type."""
    text = repr(value)
    is_plain = isinstance(value, str | int | float | list | tuple | None)
    is_short = is_plain and len(text) < 60 and "\n" not in text
    return text if is_short else f"of type {type(value).__name__}"


def _describe(choices: tuple[Any, ...]) -> str:
    """Return what to give for a parameter with these types."""
    return " or ".join(dict.fromkeys(_describe_type(each) for each in choices))


def _describe_type(annotation: Any) -> str:
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if _is_array_type(annotation):
        return "an array"
    if origin in CONTAINERS:
        return "a list"
    descriptions: dict[Any, str] = {
        None: "None",
        int: "an integer",
        float: "a number",
        str: "a string",
    }
    descriptions |= {collections.abc.Callable: "a function", collections.abc.Mapping: "a dict"}
    descriptions |= {dict: "a dict", bool: "True or False"}
    name = annotation if isinstance(annotation, str) else getattr(origin, "__name__", str(origin))
    return descriptions.get(origin, f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}")
