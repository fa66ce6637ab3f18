"""Messages of `shapes.check_shapes`: what differs, and what to give."""

from collections.abc import Mapping
from typing import Any

_KINDS = {int: "integers, such as int32", float: "floats", bool: "booleans"}


def explain_mismatch(name: str, sizes: Mapping[str, int], arrays: Mapping[str, Any]) -> str:
    """Describe what is wrong with the array `name`, the first that does not fit.

    Args:
      name: Name of the argument.
      sizes: Sizes by axis letter, as given to `check_shapes`.
      arrays: Specs by name, as given to `check_shapes`.
    """
    array, axes, *kinds = arrays[name]
    letters = axes.split()
    expected = f"[{', '.join(letters)}]"
    if not hasattr(array, "shape"):
        return f"{name} of type {type(array).__name__}: is not an array; give one of {expected}"
    shape = array.shape
    if len(shape) != len(letters):
        return f"{name} of shape {shape}: has {len(shape)} axes; give {expected}"
    bound: dict[str, tuple[int, str]] = {each: (size, "the call") for each, size in sizes.items()}
    for other, (source, source_axes, *_) in arrays.items():
        for letter, size in zip(source_axes.split(), getattr(source, "shape", ()), strict=False):
            if letter.endswith("?") and size == 1:
                continue
            wanted, owner = bound.setdefault(letter.rstrip("?"), (size, other))
            if other == name and size != wanted:
                return (
                    f"{name} of shape {shape}: axis {letter.rstrip('?')} is {size}, but {owner} "
                    f"has {wanted}; give {expected} with equal sizes"
                )
    return f"{name} of dtype {array.dtype}: give {_KINDS[kinds[0]]}"
