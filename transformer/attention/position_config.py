"""No positions.

A table of positions, added to the embeddings (Gehring et al. 2017).

Sines and cosines of the position, added to the embeddings (Vaswani et al. 2017, section 3.5).

Rotary embeddings: queries and keys turned by their positions (Su et al. 2021).

Relative positions with learned tables for keys and values (Shaw et al. 2018).

T5's bias of the scores by the distance's bucket.

ALiBi: scores fall with the distance, at a fixed slope for each head.

Where a token stands, one idea a file: what attention knows, and what embeddings are told.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from transformer.validation import check_at_least

if TYPE_CHECKING:
    pass
import math
from typing import TYPE_CHECKING, Literal, get_args

from transformer.attention.rope_scaling import NoScaling, RopeScaling
from transformer.validation import check_choice

if TYPE_CHECKING:
    pass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


@dataclasses.dataclass(frozen=True)
class NoPosition:
    """Positions are not told here (they may be elsewhere: in the embeddings, or in attention)."""


@dataclasses.dataclass(frozen=True)
class LearnedPositions:
    """A learned vector for each position, added to the embedding; longer inputs are refused."""

    max_length: int = 1024
    """Rows of the table."""

    def __post_init__(self) -> None:
        check_at_least("learned_positions.max_length", self.max_length, 1)


FREQUENCY_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class SinusoidalPositions:
    """A fixed vector for each position, of any length: it has no weights."""


RopeLayout = Literal["halves", "interleaved"]


@dataclasses.dataclass(frozen=True)
class RoPE:
    """Rotary embeddings of queries and keys (Su et al. 2021, section 3.2)."""

    theta: float = 10_000.0
    """Wavelengths run from 2 pi to 2 pi * base."""
    fraction: float = 1.0
    """Share of the head's width that is rotated, from its start."""
    layout: RopeLayout = "halves"
    """Which entries are a pair: (i, i + R/2), as in Llama's published weights, or (2i, 2i + 1), as
    in the paper."""
    scaling: RopeScaling = NoScaling()
    """How a model that was trained on short inputs is made to read longer ones."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"rotary.fraction {self.fraction}: give a share in (0, 1]")
        if self.theta <= 1:
            raise ValueError(f"rotary.theta {self.theta}: give more than 1")
        check_choice("rotary.layout", self.layout, get_args(RopeLayout))

    def rotary_dim(self, width: int) -> int:
        """How many of `width` entries are rotated: an even number R."""
        return int(width * self.fraction) // 2 * 2


@dataclasses.dataclass(frozen=True)
class RelativePositions:
    """Vectors of the distance j - i, added to the key and to the value (Shaw et al. 2018).

    Each layer has its two tables, which its heads share.
    """

    max_distance: int = 16
    """k: keys further away than this are as those at this distance."""

    def __post_init__(self) -> None:
        check_at_least("relative_positions.max_distance", self.max_distance, 0)

    @property
    def num_distances(self) -> int:
        """R, rows of each table: -k to k."""
        return 2 * self.max_distance + 1


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
        check_at_least(
            "bucketed_bias.num_buckets", self.num_buckets, 4 if self.bidirectional else 2
        )
        if self.num_buckets % (4 if self.bidirectional else 2):
            raise ValueError(
                f"bucketed_bias.num_buckets {self.num_buckets}: do not halve; give a multiple of "
                f"{4 if self.bidirectional else 2}"
            )
        check_at_least(
            "bucketed_bias.max_distance", self.max_distance, self.buckets_per_direction // 2 + 1
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


@dataclasses.dataclass(frozen=True)
class ALiBi:
    """-slope * |i - j|, added to the scores: no weights, and any length (Press et al. 2022)."""


AttentionPosition = NoPosition | RoPE | RelativePositions | T5RelativeBias | ALiBi
"""What queries and keys know of each other's positions."""


PositionEmbedding = NoPosition | LearnedPositions | SinusoidalPositions
"""What is added to the embeddings to tell positions."""
