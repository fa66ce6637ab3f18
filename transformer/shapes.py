"""Shape checks at public boundaries, in the project's axis letters (see `layers.basic`)."""

from typing import Any

Spec = tuple[Any, str]
"""(array or None, axis letters separated by spaces)."""


def check_shapes(**arrays: Spec) -> None:
    """Raise ValueError unless the shapes of arrays agree, letter by letter.

    A letter is bound to the size of the first array that has it; `B?` also accepts size 1, which
    broadcasts. None is skipped. Shapes are static, so the check also works under `jax.jit`.

        check_shapes(tokens=(tokens, "B T"), positions=(positions, "B? T"))

    Args:
      **arrays: For each argument name, the array and its axis letters.
    """
    bound: dict[str, tuple[int, str]] = {}
    for name, (array, axes) in arrays.items():
        if array is None:
            continue
        letters, shape = axes.split(), array.shape
        if len(shape) != len(letters):
            raise ValueError(
                f"{name} of shape {shape}: has {len(shape)} axes; give [{', '.join(letters)}]"
            )
        for letter, size in zip(letters, shape, strict=True):
            if letter.endswith("?") and size == 1:
                continue
            expected, source = bound.setdefault(letter.rstrip("?"), (size, name))
            if size != expected:
                raise ValueError(
                    f"{name} of shape {shape}: axis {letter.rstrip('?')} is {size}, but {source} "
                    f"has {expected}; give [{', '.join(letters)}] with equal sizes"
                )
