"""Position terms of the scores: ALiBi, T5's relative bias and Shaw's relative tables."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Float32, Int

from transformer.attention.rope import RoPE
from transformer.layers.basic import declare_table
from transformer.layers.position_embedding import NoPosition
from transformer.layers.precise_einsum import DTypeLike, precise_einsum
from transformer.model_context import ModelContext
from transformer.validation import Bounds, NonNegativeInt, Settings


@dataclasses.dataclass(frozen=True)
class RelativePositions(Settings):
    """Learned vectors for the distance j - i, added to keys and values (Shaw et al. 2018).

    Each layer has two tables, shared by its heads.
    """

    max_distance: NonNegativeInt = 16
    """k: larger distances are clipped to this one."""

    @property
    def num_distances(self) -> int:
        """R, rows of each table: distances -k to k."""
        return 2 * self.max_distance + 1


@dataclasses.dataclass(frozen=True)
class T5RelativeBias(Settings):
    """A learned bias per head and bucket of distances, added to the scores.

    Raffel et al. 2020, section 2.1. Short distances have one bucket each; longer ones share buckets
    whose width grows logarithmically.
    """

    num_buckets: Annotated[int, Bounds(2, 2**16)] = 32
    """Rows of the table."""
    max_distance: Annotated[int, Bounds(1, 2**20)] = 128
    """Distances from this one on share the last bucket."""
    bidirectional: bool = False
    """Use half of the buckets for keys after the query. If False, all of these share the bucket of
    distance 0."""
    shared: bool = False
    """Share one table between all layers of an encoder or of a decoder, as T5 and MPNet do. False:
    one table for each layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        multiple = 4 if self.bidirectional else 2
        if self.num_buckets % multiple:
            raise ValueError(
                f"T5RelativeBias.num_buckets {self.num_buckets}: does not divide into halves; "
                f"give a multiple of {multiple}"
            )
        if self.max_distance <= self.buckets_per_direction // 2:
            raise ValueError(
                f"T5RelativeBias.max_distance {self.max_distance}: give "
                f"{self.buckets_per_direction // 2 + 1} or more"
            )

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


BiasFn = Callable[[jax.Array, jax.Array], jax.Array]
"""Query positions [B or 1, T], key positions [B or 1, S] -> bias [B or 1, N, T, S] of scores."""


def alibi_slopes(num_heads: int) -> Float[np.ndarray, "N"]:
    """Return 2^(-8 n / N) for head n = 1 to N (Press et al. 2022, section 3).

    If N is not a power of two: the slopes of the power below it, then every second slope of twice
    that power, as in the authors' code.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power, 2) / (2 * power))
    return np.concatenate([slopes, between[: num_heads - power]])


def alibi_bias(
    num_heads: int,
    query_positions: Int[Array, "#B T"],
    key_positions: Int[Array, "#B S"],
) -> Float32[Array, "#B N T S"]:
    """Return -slope * |i - j| for each head."""
    slopes = jnp.asarray(alibi_slopes(num_heads), jnp.float32)[None, :, None, None]
    return -slopes * jnp.abs(key_positions[:, None, :] - query_positions[:, :, None])[:, None]


def t5_relative_bias(
    table: Float[Array, "buckets N"],
    config: T5RelativeBias,
    query_positions: Int[Array, "#B T"],
    key_positions: Int[Array, "#B S"],
) -> Float[Array, "#B N T S"]:
    """Look up the bias of each head for each distance (Raffel et al. 2020, section 2.1)."""
    limit = config.max_distance
    buckets = np.array([config.bucket(distance) for distance in range(-limit, limit + 1)])
    distance = jnp.clip(key_positions[:, None, :] - query_positions[:, :, None], -limit, limit)
    return jnp.moveaxis(table[jnp.asarray(buckets)[distance + limit]], -1, 1)


class RelativeTables(struct.PyTreeNode):
    """The tables a^K and a^V of one layer (Shaw et al. 2018).

    Rows are selected by products with one-hot vectors. The gradient of a product is a product;
    that of a gather would be a slow scatter-add over every head, query and key.
    """

    keys: Float[Array, "R H"]
    values: Float[Array, "R Hv"]

    def score_terms(
        self,
        q: Float[Array, "B T N H"],
        query_positions: Int[Array, "#B T"],
        key_positions: Int[Array, "#B S"],
        dtype: DTypeLike,  # of the scores
    ) -> Float[Array, "B N T S"]:
        """Return q_i . a^K_ij, the term of the scores (equation 4)."""
        rows = self.one_hot_distances(query_positions, key_positions)
        operand_dtype = self.keys.dtype
        by_distance = precise_einsum("BTNH,RH->BNTR", q, self.keys, operand_dtype, dtype)
        return precise_einsum("BNTR,BTSR->BNTS", by_distance, rows, operand_dtype, dtype)

    def value_terms(
        self,
        weights: Float[Array, "B N T S"],
        query_positions: Int[Array, "#B T"],
        key_positions: Int[Array, "#B S"],
        dtype: DTypeLike,  # of the result
    ) -> Float[Array, "B T N Hv"]:
        """Return the sum over j of weight_ij a^V_ij, the term of the result (equation 3)."""
        rows = self.one_hot_distances(query_positions, key_positions)
        operand_dtype = self.values.dtype
        by_distance = precise_einsum("BNTS,BTSR->BNTR", weights, rows, operand_dtype, dtype)
        return precise_einsum("BNTR,RH->BTNH", by_distance, self.values, operand_dtype, dtype)

    def one_hot_distances(
        self,
        query_positions: Int[Array, "#B T"],
        key_positions: Int[Array, "#B S"],
    ) -> Float[Array, "#B T S R"]:
        """Return the one-hot row of the tables for each query and key."""
        num_distances = len(self.keys)
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        row = jnp.clip(distance + num_distances // 2, 0, num_distances - 1)
        return jax.nn.one_hot(row, num_distances, dtype=self.keys.dtype)


class PositionTerms(NamedTuple):
    """Position terms, as fields of a `ScoreSpec`."""

    bias: BiasFn | None = None
    relative_tables: RelativeTables | None = None


def position_terms(
    module: nn.Module,
    position: AttentionPosition,
    context: ModelContext,
    *,
    num_heads: int,  # N
    key_head_dim: int,  # H
    value_head_dim: int,  # H of values
    shared_bias: Float[Array, "buckets N"] | None = None,  # of `MixerInputs`
) -> PositionTerms:
    """Declare the tables of a position as weights of `module`; return its terms.

    Raises:
      ValueError: The table is shared, and the model has none.
    """
    match position:
        case ALiBi():
            return PositionTerms(bias=functools.partial(alibi_bias, num_heads))
        case T5RelativeBias():
            if not position.shared:
                table = declare_bias_table(module, position, num_heads, context)
            elif shared_bias is None:
                raise ValueError(
                    "T5RelativeBias.shared True: a mixer alone has no table of its model; set it "
                    "to False"
                )
            else:
                table = shared_bias
            return PositionTerms(bias=functools.partial(t5_relative_bias, table, position))
        case RelativePositions():
            keys = declare_table(
                module,
                "position_keys",
                outputs={"distances": position.num_distances, "head": key_head_dim},
                context=context,
            )
            values = declare_table(
                module,
                "position_values",
                outputs={"distances": position.num_distances, "head": value_head_dim},
                context=context,
            )
            dtype = context.precision.compute
            tables = RelativeTables(keys.astype(dtype), values.astype(dtype))
            return PositionTerms(relative_tables=tables)
    return PositionTerms()


def declare_bias_table(
    module: nn.Module, position: T5RelativeBias, num_heads: int, context: ModelContext
) -> Float[Array, "buckets N"]:
    """Declare the table `position_bias` of `module`."""
    # A table is not a linear map, as nothing is summed over its rows: all its axes are outputs.
    outputs = {"buckets": position.num_buckets, "heads": num_heads}
    return declare_table(module, "position_bias", outputs=outputs, context=context)
