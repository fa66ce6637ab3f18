"""How many keys a query sees under a pattern, on average over a sequence."""

from typing import NamedTuple

import numpy as np

from transformer.attention.base import ScoreFlops
from transformer.attention.config import MultiHeadConfig
from transformer.attention.variants.sparse_configs import (
    HEAD_GROUPS,
    LongformerConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
)


class MeanVisibleKeys(NamedTuple):
    """Means over the T queries."""

    bidirectional: float
    """Without a causal mask."""
    causal: float

    def flops(self, config: MultiHeadConfig, width: int) -> ScoreFlops:
        """A product of a query and a key, and a share of a value, for each key seen."""
        each = 4 * config.num_heads * config.resolved_head_dim(width)
        return ScoreFlops(full=round(each * self.bidirectional), causal=round(each * self.causal))


def sliding_window_visible_keys(config: SlidingWindowConfig, length: int) -> MeanVisibleKeys:
    """Those less than W steps away."""
    behind = np.minimum(np.arange(length), config.receptive_field - 1) // config.dilation
    return _seen(behind, 1)


def grouped_visible_keys(window: int, length: int) -> MeanVisibleKeys:
    """Members of a query's group, at most: as many as if all tokens were in one."""
    return _seen(np.minimum(np.arange(length), window - 1), 1)


def sparse_transformer_visible_keys(
    config: SparseTransformerConfig, length: int
) -> MeanVisibleKeys:
    """Of the strided or fixed pattern, a mean over the heads."""
    index, stride, summary = np.arange(length), config.stride, config.num_summary_tokens
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
    counts = [_seen(*parts[part]) for part in HEAD_GROUPS[config.factorization]]
    return MeanVisibleKeys(*(float(np.mean(each)) for each in zip(*counts, strict=True)))


def longformer_visible_keys(config: LongformerConfig, length: int) -> MeanVisibleKeys:
    """The window and the first tokens of one document; of those first tokens all keys."""
    index, first = np.arange(length), min(config.num_global_tokens, length)
    behind, ahead = np.zeros(length), np.zeros(length)
    for steps in config.dilations:
        reach = config.one_sided_window * steps
        behind += np.minimum(index, reach) // steps
        ahead += np.minimum(length - 1 - index, reach) // steps
        for each in range(first):
            distance = np.abs(index - each)
            beside = (distance > reach) | (distance % steps != 0)
            behind += beside
    behind, ahead = behind / len(config.dilations), ahead / len(config.dilations)
    behind[:first], ahead[:first] = index[:first], length - 1 - index[:first]
    return MeanVisibleKeys(float((behind + ahead).mean()) + 1, float(behind.mean()) + 1)


def _seen(behind: np.ndarray, itself: int) -> MeanVisibleKeys:
    """Patterns look alike in both directions."""
    return MeanVisibleKeys(2 * float(behind.mean()) + itself, float(behind.mean()) + itself)
