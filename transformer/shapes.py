"""Checks of shapes and dtypes at public boundaries, in the project's axis letters.

The letters are those of `layers.params`. Shapes and dtypes are static: under `jax.jit` the checks
run while the function is traced and leave nothing in the program.
"""

from typing import Any

Spec = tuple[Any, str] | tuple[Any, str, type]
"""(array or None, axis letters separated by spaces[, int, float or bool])."""


def check_shapes(**arrays: Spec | int) -> None:
    """Raise ValueError unless arrays have these axes and dtypes, and equal letters equal sizes.

    A letter is bound to the size of the first array that has it, or to a number: `T=5`. `B?` also
    accepts size 1, which broadcasts. None is skipped. `int` and `float` stand for every width.

        check_shapes(tokens=(tokens, "B T", int), positions=(positions, "B? T", int))

    Args:
      **arrays: For each argument name, the array, its axis letters and its kind of dtype.
    """
    import chex  # Adds 40 ms to the import of JAX, and no module needs it before its first call.

    sizes: dict[str, tuple[int, str]] = {}
    for name, spec in arrays.items():
        if isinstance(spec, int):
            sizes[name] = spec, "the call"
            continue
        array, axes, *kind = spec
        if array is None:
            continue
        letters = axes.split()
        if not hasattr(array, "shape"):
            raise ValueError(
                f"{name} of type {type(array).__name__}: is not an array; give one of shape "
                f"[{', '.join(letters)}]"
            )
        try:
            chex.assert_rank(array, len(letters))
            for letter, size in zip(letters, array.shape, strict=True):
                if not (letter.endswith("?") and size == 1):
                    sizes.setdefault(letter.rstrip("?"), (size, name))
            chex.assert_shape(array, [_allowed_sizes(letter, sizes) for letter in letters])
        except AssertionError:
            raise ValueError(_shape_problem(name, array.shape, letters, sizes)) from None
        try:
            for expected in kind:
                chex.assert_type(array, expected)
        except AssertionError:
            remedy = {int: "integers, such as int32", float: "floats", bool: "booleans"}[kind[0]]
            raise ValueError(f"{name} of dtype {array.dtype}: give {remedy}") from None


def check_index_dtype(num_rows: int, **indices: Any) -> None:
    """Raise ValueError for signed integers too narrow to index a table: JAX overflows inside.

    Args:
      num_rows: Rows of the table.
      **indices: Integer arrays (None is skipped) by argument name.
    """
    import numpy as np

    for name, array in indices.items():
        if array is None or array.dtype.kind != "i" or num_rows <= np.iinfo(array.dtype).max:
            continue
        raise ValueError(
            f"{name} of dtype {array.dtype}: cannot index {num_rows:,} rows; give int32"
        )


def _allowed_sizes(letter: str, sizes: dict[str, tuple[int, str]]) -> set[int]:
    """Return the sizes that an axis may have."""
    size, _ = sizes.get(letter.rstrip("?"), (1, ""))
    return {1, size} if letter.endswith("?") else {size}


def _shape_problem(
    name: str, shape: tuple[int, ...], letters: list[str], sizes: dict[str, tuple[int, str]]
) -> str:
    """Describe the first axis of an array that is wrong."""
    expected = f"[{', '.join(letters)}]"
    if len(shape) != len(letters):
        return f"{name} of shape {shape}: has {len(shape)} axes; give {expected}"
    letter, size = next(
        (letter.rstrip("?"), size)
        for letter, size in zip(letters, shape, strict=True)
        if size not in _allowed_sizes(letter, sizes)
    )
    wanted, source = sizes[letter]
    return (
        f"{name} of shape {shape}: axis {letter} is {size}, but {source} has {wanted}; "
        f"give {expected} with equal sizes"
    )
