"""Mean number of keys that a query sees under a sparse pattern, for FLOPs estimates."""

from typing import NamedTuple

import numpy as np

from transformer.attention.mixer import ScoreFlops
from transformer.attention.projections import MultiHeadConfig
from transformer.attention.variants.sparse_configs import (
    HEAD_GROUPS,
    LongformerConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
)


class MeanVisibleKeys(NamedTuple):
    """Number of visible keys, averaged over the T queries of a sequence."""

    bidirectional: float
    """Mean without a causal mask."""
    causal: float

    def flops(self, config: MultiHeadConfig, width: int) -> ScoreFlops:
        """Count one dot product and one weighted value per head and visible key."""
        each = 4 * config.num_heads * config.resolved_head_dim(width)
        return ScoreFlops(full=round(each * self.bidirectional), causal=round(each * self.causal))


def sliding_window_visible_keys(config: SlidingWindowConfig, length: int) -> MeanVisibleKeys:
    """Average over keys less than W steps away."""
    behind = np.minimum(np.arange(length), config.receptive_field - 1) // config.dilation
    return _seen(behind, 1)


def grouped_visible_keys(window: int, length: int) -> MeanVisibleKeys:
    """Return an upper bound: members of a query's group if all tokens were in one group."""
    return _seen(np.minimum(np.arange(length), window - 1), 1)


def sparse_transformer_visible_keys(
    config: SparseTransformerConfig, length: int
) -> MeanVisibleKeys:
    """Average over queries and heads for the strided or fixed pattern."""
    index, stride, summary = np.arange(length), config.stride, config.num_summary_tokens
    if config.pattern == "strided":
        near, far, both = np.minimum(index, stride), index // stride, (index >= stride) * 1
        parts = {"local": (near, 1), "far": (far, 1), "merged": (near + far - both, 1)}
    else:
        blocks, place = index // stride, index % stride
        earlier, is_summary = blocks * summary, place >= stride - summary
        parts = {
            "local": (place, 1),
            # A query sees itself only if it is a summary token.
            "far": (earlier + np.maximum(0, place - (stride - summary)), is_summary.mean()),
            "merged": (earlier + place, 1),
        }
    counts = [_seen(*parts[part]) for part in HEAD_GROUPS[config.factorization]]
    return MeanVisibleKeys(*(float(np.mean(each)) for each in zip(*counts, strict=True)))


def longformer_visible_keys(config: LongformerConfig, length: int) -> MeanVisibleKeys:
    """Average over window and global keys of one document; global queries see all keys."""
    index, first = np.arange(length), min(config.num_global_tokens, length)
    behind, ahead = np.zeros(length), np.zeros(length)
    for steps in config.dilations:
        reach = config.one_sided_window * steps
        behind += np.minimum(index, reach) // steps
        ahead += np.minimum(length - 1 - index, reach) // steps
        for each in range(first):
            distance = np.abs(index - each)
            outside_window = (distance > reach) | (distance % steps != 0)
            behind += outside_window
    behind, ahead = behind / len(config.dilations), ahead / len(config.dilations)
    behind[:first], ahead[:first] = index[:first], length - 1 - index[:first]
    return MeanVisibleKeys(float((behind + ahead).mean()) + 1, float(behind.mean()) + 1)


def _seen(behind: np.ndarray, itself: float) -> MeanVisibleKeys:
    """Return the means of a pattern that is symmetric in both directions."""
    return MeanVisibleKeys(2 * float(behind.mean()) + itself, float(behind.mean()) + itself)
