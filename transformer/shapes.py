"""Checks of shapes and dtypes at public boundaries, in the axis letters of `layers.basic`."""

from typing import Any

Spec = tuple[Any, ...]
"""(array or None, axis letters separated by spaces[, int, float or bool])."""


def check_shapes(sizes: dict[str, int] | None = None, /, **arrays: Spec) -> None:
    """Raise ValueError unless arrays have these axes and dtypes; equal letters have equal sizes.

    A letter is bound to its size in `sizes`, else in the first array that has it; `B?` also accepts
    size 1, which broadcasts. None is skipped. A traced program keeps nothing of the checks.

        check_shapes(tokens=(tokens, "B T", int), positions=(positions, "B? T", int))
    """
    import chex  # adds 40 ms to the import of JAX

    bound = dict(sizes or {})
    for name, (array, axes, *kinds) in arrays.items():
        if array is None:
            continue
        letters = axes.split()
        for letter, size in zip(letters, getattr(array, "shape", ()), strict=False):
            if not (letter.endswith("?") and size == 1):
                bound.setdefault(letter.rstrip("?"), size)
        try:
            chex.assert_shape(array, [_allowed_sizes(letter, bound) for letter in letters])
            chex.assert_type([array] * len(kinds), kinds)
        except AssertionError as error:
            from transformer.shape_errors import explain_mismatch

            raise ValueError(explain_mismatch(name, sizes or {}, arrays)) from error


def _allowed_sizes(letter: str, bound: dict[str, int]) -> set[int]:
    return {1, bound.get(letter[:-1], 1)} if letter.endswith("?") else {bound.get(letter, 0)}
