"""Mean number of keys that a query sees under a sparse pattern, for FLOPs estimates."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from transformer.attention.mixer import ScoreFlops
from transformer.attention.projections import MultiHeadConfig


class MeanVisibleKeys(NamedTuple):
    """Number of visible keys, averaged over the T queries of a sequence."""

    bidirectional: float
    """Mean without a causal mask."""
    causal: float

    def flops(self, config: MultiHeadConfig, width: int) -> ScoreFlops:
        """Count one dot product and one weighted value per head and visible key."""
        per_key = 4 * config.num_heads * config.resolved_head_dim(width)
        return ScoreFlops(
            full=round(per_key * self.bidirectional), causal=round(per_key * self.causal)
        )


def symmetric_visible_keys(
    keys_before: Shaped[np.ndarray, "T"],  # visible keys before each query
    itself: float = 1,  # 1 if a query sees itself, or the share of queries that do
) -> MeanVisibleKeys:
    """Return the means of a pattern that is symmetric in both directions."""
    before = float(keys_before.mean())
    return MeanVisibleKeys(2 * before + itself, before + itself)


def grouped_visible_keys(window: int, length: int) -> MeanVisibleKeys:
    """Return an upper bound: members of a query's group if all tokens were in one group."""
    return symmetric_visible_keys(np.minimum(np.arange(length), window - 1))
