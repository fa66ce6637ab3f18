"""Checks of shapes and dtypes at public boundaries, in the axis letters of `layers.basic`."""

from typing import Any

Spec = tuple[Any, ...]
"""(array, axis letters separated by spaces[, int, float, bool or int, bool]), or (value, class)."""


def check_shapes(sizes: dict[str, int] | None = None, /, **values: Spec) -> None:
    """Raise ValueError unless arrays have these axes and dtypes; equal letters have equal sizes.

    A letter is bound to its size in `sizes`, else in the first array that has it; `B?` also accepts
    size 1, which broadcasts; `...` is any axes. A traced program keeps nothing of the checks.
    """
    bound = dict(sizes or {})
    for name, (value, axes, *kinds) in values.items():
        is_class = isinstance(axes, type)
        if not (isinstance(value, axes) if is_class else _fits(value, axes, kinds, bound)):
            from transformer.shape_errors import explain_mismatch

            raise ValueError(explain_mismatch(name, sizes or {}, values))


def _fits(array: Any, axes: str, kinds: list[type], bound: dict[str, int]) -> bool:
    import chex  # adds 40 ms to the import of JAX

    if not hasattr(array, "shape"):
        return array is None and axes.endswith("| None")
    letters = axes.removesuffix("| None").split()
    if letters[:1] == ["..."]:
        leading = bound.setdefault("...", array.ndim + 1 - len(letters))
        letters = [*map(str, range(leading)), *letters[1:]]
    for letter, size in zip(letters, array.shape, strict=False):
        if not (letter.endswith("?") and size == 1):
            bound.setdefault(letter.rstrip("?"), size)
    sizes = [{1, bound.get(x[:-1], 1)} if x.endswith("?") else {bound.get(x, 0)} for x in letters]
    try:
        chex.assert_shape(array, sizes)
        if kinds:
            chex.assert_type(array, bool if bool in kinds and array.dtype == bool else kinds[0])
    except AssertionError:
        return False
    return True


def may_be_below(indices: Any, limit: int) -> bool:
    """Return False if an index is known to lie outside of [0, limit). Traced ones are not known."""
    import jax  # settings import this file, and load without it
    import numpy as np

    if isinstance(indices, jax.core.Tracer) or not getattr(indices, "is_fully_addressable", True):
        return True
    values = np.asarray(indices)  # by NumPy, which computes while JAX traces
    return not values.size or bool(values.min() >= 0 and values.max() < limit)
