"""T5's bias of the scores by the distance's bucket."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from transformer.checks import check_at_least

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class T5RelativeBias:
    """A learned number for each head and bucket of distances, added to the scores.

    Raffel et al. 2020, section 2.1. Short distances have a bucket each, longer ones share buckets
    that grow with the logarithm. Each layer has its table; T5 shares its first layer's.
    """

    num_buckets: int = 32
    max_distance: int = 128
    """Distances from here on share the last bucket."""
    bidirectional: bool = False
    """Whether half of the buckets are for keys ahead. Without, all keys ahead are as one at the
    query's own place."""

    def __post_init__(self) -> None:
        check_at_least("bucketed_bias.buckets", self.num_buckets, 4 if self.bidirectional else 2)
        if self.num_buckets % (4 if self.bidirectional else 2):
            raise ValueError(
                f"bucketed_bias.buckets {self.num_buckets}: do not halve; give a multiple of "
                f"{4 if self.bidirectional else 2}"
            )
        check_at_least(
            "bucketed_bias.furthest", self.max_distance, self.buckets_per_direction // 2 + 1
        )

    @property
    def buckets_per_direction(self) -> int:
        """Buckets for the distances of one direction."""
        return self.num_buckets // 2 if self.bidirectional else self.num_buckets

    def bucket(self, distance: int) -> int:
        """The bucket of a key that stands at the query's position + distance."""
        ahead = self.bidirectional and distance > 0
        away = abs(distance) if self.bidirectional else max(-distance, 0)
        exact = self.buckets_per_direction // 2
        if away < exact:
            return away + ahead * self.buckets_per_direction
        share = math.log(away / exact) / math.log(self.max_distance / exact)
        # A distance that is the first of its bucket must not fall short of it by rounding.
        bucket = exact + int(share * (self.buckets_per_direction - exact) + 1e-6)
        return min(bucket, self.buckets_per_direction - 1) + ahead * self.buckets_per_direction


def t5_relative_bias(
    table: jax.Array,  # [buckets, N]
    config: T5RelativeBias,
    query_positions: jax.Array,  # [B or 1, T]
    key_positions: jax.Array,  # [B or 1, S]
) -> jax.Array:  # [B or 1, N, T, S]
    """The number of each head for each query's and key's distance."""
    import jax.numpy as jnp
    import numpy as np

    last = config.max_distance
    buckets = np.array([config.bucket(distance) for distance in range(-last, last + 1)])
    distance = jnp.clip(key_positions[:, None, :] - query_positions[:, :, None], -last, last)
    return jnp.moveaxis(table[jnp.asarray(buckets)[distance + last]], -1, 1)
