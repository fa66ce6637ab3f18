"""Errors of arrays and weights of wrong shapes or dtypes: what differs, and what to give."""

from collections.abc import Mapping
from typing import Any, NoReturn

MAX_WEIGHT_SIZE = 2**44
"""Most entries of one weight of one layer. XLA counts the bytes of all layers in 64 bits."""

_CLASSES = {"Mapping": "a dict", "Set": "a set, such as {'logits'}", "Callable": "a function"}
"""Descriptions of abstract classes."""

_KINDS = {int: "integers, such as int32", float: "floats", bool: "booleans"}


def explain_mismatch(name: str, sizes: Mapping[str, int], values: Mapping[str, Any]) -> str:
    """Describe what is wrong with the argument `name`, the first that does not fit.

    Args:
      name: Name of the argument.
      sizes: Sizes by axis letter, as given to `check_shapes`.
      values: Specs by name, as given to `check_shapes`.
    """
    array, axes, *kinds = values[name]
    if isinstance(axes, type):
        remedy = _CLASSES.get(axes.__name__, f"a {axes.__name__}")
        return f"{name} of type {type(array).__name__}: give {remedy}"
    expected = f"[{', '.join(axes.removesuffix('| None').split())}]"
    if not hasattr(array, "shape"):
        return f"{name} of type {type(array).__name__}: is not an array; give one of {expected}"
    shape, leading = array.shape, _count_leading(values)
    letters = _letters(axes, leading)
    if len(shape) != len(letters):
        hint = ""
        if "..." in axes:
            other = next(n for n, (_, each, *_) in values.items() if "..." in str(each))
            hint = f", to go with {other} of shape {values[other][0].shape}"
        return f"{name} of shape {shape}: has {len(shape)} axes; give {expected}{hint}"
    bound: dict[str, tuple[int, str]] = {each: (size, "the call") for each, size in sizes.items()}
    for other, (source, source_axes, *_) in values.items():
        names, source_shape = _letters(source_axes, leading), getattr(source, "shape", ())
        for letter, size in zip(names, source_shape, strict=False):
            if letter.endswith("?") and size == 1:
                continue
            expected_size, owner = bound.setdefault(letter.rstrip("?"), (size, other))
            if other == name and size != expected_size:
                return (
                    f"{name} of shape {shape}: axis {letter.rstrip('?')} is {size}, but {owner} "
                    f"has {expected_size}; give {expected} with equal sizes"
                )
    return f"{name} of dtype {array.dtype}: give {_KINDS[kinds[0]]}"


def reject_weight(name: str, value: Any, shape: tuple[int, ...]) -> NoReturn:
    """Raise ValueError for a parameter that is not a float array of this shape."""
    if not hasattr(value, "shape"):
        raise ValueError(
            f"weight {name} of type {type(value).__name__}: is not an array; give the parameters "
            "of this configuration"
        )
    if value.shape != shape:
        raise ValueError(
            f"weight {name} of shape {value.shape}: the model has {shape}; give the parameters of "
            "this configuration"
        )
    raise ValueError(
        f"weight {name} of dtype {value.dtype}: the model has floats; give the parameters of this "
        "configuration"
    )


def reject_weight_size(name: str, shape: tuple[int, ...]) -> NoReturn:
    """Raise ValueError for a weight that is too large."""
    raise ValueError(
        f"weight {name}: {' x '.join(map(str, shape))} entries are more than any memory holds; "
        "lower the model's sizes"
    )


def _letters(axes: Any, leading: int) -> list[str]:
    """Return the axes of a spec, with `...` as `leading` numbers; none if it is a class."""
    if not isinstance(axes, str):
        return []
    numbers = " ".join(map(str, range(leading)))
    return axes.removesuffix("| None").replace("...", numbers).split()


def _count_leading(values: Mapping[str, Any]) -> int:
    """Return the number of axes that `...` stands for: those of the first array that has it."""
    for array, axes, *_ in values.values():
        if isinstance(axes, str) and "..." in axes and hasattr(array, "shape"):
            return max(0, len(array.shape) + 1 - len(axes.split()))
    return 0
