"""T5's bias of the scores by the distance's bucket."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from transformer.checks import check_least

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class BucketedBias:
    """A learned number for each head and bucket of distances, added to the scores.

    Raffel et al. 2020, section 2.1. Short distances have a bucket each, longer ones share buckets
    that grow with the logarithm. Each layer has its table; T5 shares its first layer's.
    """

    buckets: int = 32
    furthest: int = 128
    """Distances from here on share the last bucket."""
    bidirectional: bool = False
    """Whether half of the buckets are for keys ahead. Without, all keys ahead are as one at the
    query's own place."""

    def __post_init__(self) -> None:
        check_least("bucketed_bias.buckets", self.buckets, 4 if self.bidirectional else 2)
        if self.buckets % (4 if self.bidirectional else 2):
            raise ValueError(
                f"bucketed_bias.buckets {self.buckets}: do not halve; give a multiple of "
                f"{4 if self.bidirectional else 2}"
            )
        check_least("bucketed_bias.furthest", self.furthest, self.one_way // 2 + 1)

    @property
    def one_way(self) -> int:
        """Buckets for the distances of one direction."""
        return self.buckets // 2 if self.bidirectional else self.buckets

    def bucket(self, distance: int) -> int:
        """The bucket of a key that stands at the query's position + distance."""
        ahead = self.bidirectional and distance > 0
        away = abs(distance) if self.bidirectional else max(-distance, 0)
        exact = self.one_way // 2
        if away < exact:
            return away + ahead * self.one_way
        share = math.log(away / exact) / math.log(self.furthest / exact)
        # A distance that is the first of its bucket must not fall short of it by rounding.
        bucket = exact + int(share * (self.one_way - exact) + 1e-6)
        return min(bucket, self.one_way - 1) + ahead * self.one_way


def bucketed_bias(
    table: jax.Array,  # [buckets, N]
    config: BucketedBias,
    query_positions: jax.Array,  # [B or 1, T]
    key_positions: jax.Array,  # [B or 1, S]
) -> jax.Array:  # [B or 1, N, T, S]
    """The number of each head for each query's and key's distance."""
    import jax.numpy as jnp
    import numpy as np

    last = config.furthest
    buckets = np.array([config.bucket(distance) for distance in range(-last, last + 1)])
    distance = jnp.clip(key_positions[:, None, :] - query_positions[:, :, None], -last, last)
    return jnp.moveaxis(table[jnp.asarray(buckets)[distance + last]], -1, 1)
