"""Check of the arrays of a mask against the queries and keys that it is for."""

from transformer.attention.masks import Mask
from transformer.shapes import check_shapes


def check_mask(
    mask: Mask,
    num_queries: int,  # T
    num_keys: int,  # S
) -> None:
    """Raise ValueError if an array of the mask has another shape or dtype than its comment says."""
    key_segments = mask.segments if mask.key_segments is None else mask.key_segments
    check_shapes(
        {"T": num_queries, "S": num_keys},
        positions=(mask.positions, "B? T", int),
        key_positions=(mask.key_positions, "B? S", int),
        segments=(mask.segments, "B? T"),
        key_segments=(key_segments, "B? S"),
        key_lengths=(mask.key_lengths, "B?", int),
        prefix_lengths=(mask.prefix_lengths, "B?", int),
        global_positions=(mask.global_positions, "B? n", int),
        allowed=(mask.allowed, "B? T S", bool),
    )
