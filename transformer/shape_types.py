"""Checks of the shapes and dtypes in annotations at every call: in the tests, and on request.

Annotations name axes by the letters of `layers.basic`: `Float[Array, "B T D"]`; `#B` is B or 1.
`TRANSFORMER_TYPECHECK=1` makes the package install jaxtyping's import hook with `check`; then equal
letters must have equal sizes within a call. Without it annotations cost nothing.
"""

import types
import typing
from collections.abc import Callable
from typing import Any

import beartype
from jaxtyping import AbstractArray


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which checks arrays by their annotations and nothing else.

    Other types are mypy's: settings get wrong values on purpose in tests, and check themselves. The
    fields of a struct are not checked when it is built: JAX builds structs of layouts, axes,
    `ShapeDtypeStruct`s and stacked arrays.
    """
    hints = {
        name: _any_array(hint)
        for name, hint in function.__annotations__.items()
        if _has_shape(hint)
    }
    if function.__name__ == "__init__" or not hints:
        return function
    function.__annotations__ = hints
    return beartype.beartype(function)


def _has_shape(hint: Any) -> bool:
    is_shape = isinstance(hint, type) and issubclass(hint, AbstractArray)
    return is_shape or any(map(_has_shape, typing.get_args(hint)))


def _any_array(hint: Any) -> Any:
    """Return a type for anything with a shape and a dtype, such as NumPy's arrays."""
    if not _has_shape(hint):
        return hint
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return hint.dtype[Any, hint.dim_str]
    parts = tuple(_any_array(part) for part in typing.get_args(hint))
    origin: Any = typing.get_origin(hint)
    return typing.Union[parts] if origin in (typing.Union, types.UnionType) else origin[parts]  # noqa: UP007
