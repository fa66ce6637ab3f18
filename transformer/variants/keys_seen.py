"""How many keys a query sees under a pattern, on average over a sequence."""

from typing import Any, NamedTuple

import numpy as np

from transformer.layer_configs import HeadsConfig
from transformer.mixers import ScoreFlops
from transformer.variants.bigbird_pattern import chosen_blocks, random_blocks
from transformer.variants.configs import (
    PARTS,
    BigBirdConfig,
    LongformerConfig,
    SlidingWindowConfig,
    SparseConfig,
)


class KeysSeen(NamedTuple):
    """Means over the T queries."""

    all: float
    """Without a causal mask."""
    causal: float

    def flops(self, config: HeadsConfig, width: int) -> ScoreFlops:
        """A product of a query and a key, and a share of a value, for each key seen."""
        each = 4 * config.heads * config.query_width(width)
        return ScoreFlops(full=round(each * self.all), causal=round(each * self.causal))


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


def in_longformer(config: LongformerConfig, length: int) -> KeysSeen:
    """The window and the first tokens of one document; of those first tokens all keys."""
    index, first = np.arange(length), min(config.global_tokens, length)
    behind, ahead = np.zeros(length), np.zeros(length)
    for steps in config.dilations:
        reach = config.window * steps
        behind += np.minimum(index, reach) // steps
        ahead += np.minimum(length - 1 - index, reach) // steps
        for each in range(first):
            distance = np.abs(index - each)
            beside = (distance > reach) | (distance % steps != 0)
            behind += beside
    behind, ahead = behind / len(config.dilations), ahead / len(config.dilations)
    behind[:first], ahead[:first] = index[:first], length - 1 - index[:first]
    return KeysSeen(float((behind + ahead).mean()) + 1, float(behind.mean()) + 1)


def in_bigbird(config: BigBirdConfig, length: int) -> KeysSeen:
    """The chosen blocks, as layer 0 draws them, and all of them for the global ones."""
    own = np.arange(-(-length // config.block))
    sizes = np.minimum(config.block, length - own * config.block)
    counts = (config.random_blocks, config.window_blocks, config.global_blocks)
    rows = -(-config.span // config.block)
    table = random_blocks(config.seed, 0, config.heads, rows, *counts)

    def blocks(causal: bool) -> np.ndarray:  # [N, blocks, blocks] booleans
        last: Any = own[-1:] if config.last_is_global and not causal else None
        chosen = np.asarray(chosen_blocks(table, len(own), *counts[1:], last, causal))[0]
        seen = np.zeros((config.heads, len(own), len(own) + 1), bool)
        np.put_along_axis(seen, chosen, True, axis=-1)  # what is not there goes behind the last
        seen = seen[..., :-1]
        seen[:, : config.global_blocks] = True
        seen[:, own[-1:]] |= last is not None
        return seen

    def mean(keys: np.ndarray) -> float:  # [N, blocks] of each query of a block
        return float((keys * sizes).sum() / (config.heads * length))

    earlier = blocks(True) & (own < own[:, None])
    return KeysSeen(mean(blocks(False) @ sizes), mean(earlier @ sizes + (sizes + 1) / 2))


def _seen(behind: np.ndarray, itself: int) -> KeysSeen:
    """Patterns look alike in both directions."""
    return KeysSeen(2 * float(behind.mean()) + itself, float(behind.mean()) + itself)
