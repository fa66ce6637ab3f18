"""Settings of positions, in attention and in the token embedding. Importing this loads no JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from transformer.attention.rope_scaling import NoScaling, RopeScaling
from transformer.validation import check_at_least, check_choice, check_field_types


@dataclasses.dataclass(frozen=True)
class NoPosition:
    """No position information here; attention or the embedding may still have some."""


# Added to the token embedding.


@dataclasses.dataclass(frozen=True)
class LearnedPositions:
    """A learned vector per position, added to the embedding (Gehring et al. 2017)."""

    max_length: int = 1024
    """Longest input, in tokens. Longer ones raise ValueError."""
    offset: int = 0
    """Rows of the table before that of position 0, which tokens never use. RoBERTa, BART and OPT
    have 2."""

    def __post_init__(self) -> None:
        check_at_least("learned_positions.max_length", self.max_length, 1)
        check_at_least("learned_positions.offset", self.offset, 0)


FREQUENCY_BASE = 10_000.0
"""Base of the wavelengths of `SinusoidalPositions`."""


SinusoidLayout = Literal["interleaved", "halves"]


@dataclasses.dataclass(frozen=True)
class SinusoidalPositions:
    """Sines and cosines of the position, for any length (Vaswani et al. 2017, section 3.5)."""

    layout: SinusoidLayout = "interleaved"
    """Order of the entries: `interleaved` (a sine, its cosine, ...), as in the paper; `halves` (all
    sines, all cosines), as in tensor2tensor and Marian."""

    def __post_init__(self) -> None:
        check_choice("sinusoidal_positions.layout", self.layout, get_args(SinusoidLayout))


# Used inside attention.


RopeLayout = Literal["halves", "interleaved"]


@dataclasses.dataclass(frozen=True)
class RoPE:
    """Rotary position embedding of queries and keys (Su et al. 2021, section 3.2)."""

    theta: float = 10_000.0
    """Base of the wavelengths, which range from 2 pi to 2 pi * theta positions."""
    fraction: float = 1.0
    """Fraction of the head width that is rotated, counted from its start."""
    layout: RopeLayout = "halves"
    """Entries that form a pair: `halves` (i, i + R/2), as in Llama's published weights;
    `interleaved` (2i, 2i + 1), as in the paper."""
    scaling: RopeScaling = NoScaling()
    """Frequency scaling for contexts longer than those of training."""

    def __post_init__(self) -> None:
        check_field_types(self, "rope")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"rope.fraction {self.fraction}: give a fraction in (0, 1]")
        if self.theta <= 1:
            raise ValueError(f"rope.theta {self.theta}: give more than 1")
        check_choice("rope.layout", self.layout, get_args(RopeLayout))

    def rotary_dim(self, head_dim: int) -> int:
        """Return R, the even number of entries of a head that are rotated."""
        return int(head_dim * self.fraction) // 2 * 2


@dataclasses.dataclass(frozen=True)
class RelativePositions:
    """Learned vectors for the distance j - i, added to keys and values (Shaw et al. 2018).

    Each layer has two tables, shared by its heads.
    """

    max_distance: int = 16
    """k: larger distances are clipped to this one."""

    def __post_init__(self) -> None:
        check_at_least("relative_positions.max_distance", self.max_distance, 0)

    @property
    def num_distances(self) -> int:
        """R, rows of each table: distances -k to k."""
        return 2 * self.max_distance + 1


@dataclasses.dataclass(frozen=True)
class T5RelativeBias:
    """A learned bias per head and bucket of distances, added to the scores.

    Raffel et al. 2020, section 2.1. Short distances have one bucket each; longer ones share buckets
    whose width grows logarithmically.
    """

    num_buckets: int = 32
    """Rows of the table."""
    max_distance: int = 128
    """Distances from this one on share the last bucket."""
    bidirectional: bool = False
    """Use half of the buckets for keys after the query. If False, all of these share the bucket of
    distance 0."""
    shared: bool = False
    """Share one table between all layers of an encoder or of a decoder, as T5 does. For
    encoder-decoders. False: one table for each layer."""

    def __post_init__(self) -> None:
        multiple = 4 if self.bidirectional else 2
        check_at_least("t5_relative_bias.num_buckets", self.num_buckets, multiple)
        if self.num_buckets % multiple:
            raise ValueError(
                f"t5_relative_bias.num_buckets {self.num_buckets}: does not divide into halves; "
                f"give a multiple of {multiple}"
            )
        least = self.buckets_per_direction // 2 + 1
        check_at_least("t5_relative_bias.max_distance", self.max_distance, least)

    @property
    def buckets_per_direction(self) -> int:
        """Number of buckets for distances of one sign."""
        return self.num_buckets // 2 if self.bidirectional else self.num_buckets

    def bucket(self, distance: int) -> int:
        """Return the bucket of a key at the query's position + `distance`."""
        per_direction = self.buckets_per_direction
        offset = per_direction if self.bidirectional and distance > 0 else 0
        magnitude = abs(distance) if self.bidirectional else max(-distance, 0)
        num_exact = per_direction // 2  # distances with a bucket of their own
        if magnitude < num_exact:
            return magnitude + offset
        log_fraction = math.log(magnitude / num_exact) / math.log(self.max_distance / num_exact)
        # Without the epsilon, rounding puts the first distance of a bucket into the one before.
        bucket = num_exact + int(log_fraction * (per_direction - num_exact) + 1e-6)
        return min(bucket, per_direction - 1) + offset


@dataclasses.dataclass(frozen=True)
class ALiBi:
    """-slope * |i - j| added to the scores, for any length, without weights (Press et al. 2022)."""


AttentionPosition = NoPosition | RoPE | RelativePositions | T5RelativeBias | ALiBi
"""Position information inside attention."""

PositionEmbedding = NoPosition | LearnedPositions | SinusoidalPositions
"""Position information added to the token embedding."""
