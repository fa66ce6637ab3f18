"""Checks of a mask: its arrays against the queries and keys that it is for, and its pattern."""

from transformer.attention.masks import Mask, MaskPattern
from transformer.shape_checks import check_shapes
from transformer.validation import check_instance, check_size


def check_mask(
    mask: Mask,
    num_queries: int,  # T
    num_keys: int,  # S
) -> None:
    """Raise ValueError if an array of the mask has another shape or dtype than its comment says."""
    check_size("num_queries", num_queries, 0)
    check_size("num_keys", num_keys, 0)
    key_segments = mask.segments if mask.key_segments is None else mask.key_segments
    check_shapes(
        {"T": num_queries, "S": num_keys},
        positions=(mask.positions, "B? T | None", int),
        key_positions=(mask.key_positions, "B? S | None", int),
        segments=(mask.segments, "B? T | None", int, bool),
        key_segments=(key_segments, "B? S | None", int, bool),
        key_lengths=(mask.key_lengths, "B? | None", int),
        prefix_lengths=(mask.prefix_lengths, "B? | None", int),
        global_positions=(mask.global_positions, "B? n | None", int),
        allowed=(mask.allowed, "B? T S | None", bool),
    )


def check_pattern(pattern: MaskPattern) -> None:
    """Raise ValueError for a setting of a wrong type, or a number that is too small."""
    for name, least in (("window", 0), ("dilation", 1)):
        value = getattr(pattern, name)
        if getattr(value, "ndim", 0) or not hasattr(value, "__index__") or value < least:
            value_text = repr(value) if isinstance(value, int | float) else type(value).__name__
            raise ValueError(f"{name} {value_text}: give an integer, {least} for none, or more")
    for name in ("causal", "prefix", "ordered"):
        check_instance(name, getattr(pattern, name), bool)
