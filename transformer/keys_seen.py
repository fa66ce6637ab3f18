"""How many keys a query sees under a pattern, on average over a sequence."""

from typing import NamedTuple

import numpy as np

from transformer.sliding_window import SlidingWindowConfig
from transformer.sparse import PARTS, SparseConfig


class KeysSeen(NamedTuple):
    """Means over the T queries."""

    all: float
    """Without a causal mask."""
    causal: float


def in_window(config: SlidingWindowConfig, length: int) -> KeysSeen:
    """Those less than W steps away."""
    behind = np.minimum(np.arange(length), config.reach - 1) // config.dilation
    return _seen(behind, 1)


def in_groups(window: int, length: int) -> KeysSeen:
    """Members of a query's group, at most: as many as if all tokens were in one."""
    return _seen(np.minimum(np.arange(length), window - 1), 1)


def in_sparse(config: SparseConfig, length: int) -> KeysSeen:
    """Of the strided or fixed pattern, a mean over the heads."""
    index, stride, summary = np.arange(length), config.stride, config.summary
    if config.pattern == "strided":
        near, far, both = np.minimum(index, stride), index // stride, (index >= stride) * 1
        parts = {"local": (near, 1), "far": (far, 1), "merged": (near + far - both, 1)}
    else:
        blocks, place = index // stride, index % stride
        earlier = blocks * summary
        parts = {
            "local": (place, 1),
            "far": (earlier + np.maximum(0, place - (stride - summary)), 1),
            "merged": (earlier + place, 1),
        }
    counts = [_seen(*parts[part]) for part in PARTS[config.factor]]
    return KeysSeen(*(float(np.mean(each)) for each in zip(*counts, strict=True)))


def _seen(behind: np.ndarray, itself: int) -> KeysSeen:
    """Patterns look alike in both directions."""
    return KeysSeen(2 * float(behind.mean()) + itself, float(behind.mean()) + itself)
