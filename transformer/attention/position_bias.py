"""Position terms of the scores: ALiBi, T5's relative bias and Shaw's relative tables."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from transformer.attention.attend import BiasFn
from transformer.attention.position_config import (
    ALiBi,
    AttentionPosition,
    RelativePositions,
    T5RelativeBias,
)
from transformer.config import BlockConfig
from transformer.layers.basic import declare_weight
from transformer.layers.precise_einsum import DTypeLike, precise_einsum
from transformer.model_context import ModelContext


def alibi_slopes(num_heads: int) -> np.ndarray:  # [N]
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
    query_positions: jax.Array,  # [B or 1, T]
    key_positions: jax.Array,  # [B or 1, S]
) -> jax.Array:  # [B or 1, N, T, S] float32
    """Return -slope * |i - j| for each head."""
    slopes = jnp.asarray(alibi_slopes(num_heads), jnp.float32)[None, :, None, None]
    return -slopes * jnp.abs(key_positions[:, None, :] - query_positions[:, :, None])[:, None]


def t5_relative_bias(
    table: jax.Array,  # [buckets, N]
    config: T5RelativeBias,
    query_positions: jax.Array,  # [B or 1, T]
    key_positions: jax.Array,  # [B or 1, S]
) -> jax.Array:  # [B or 1, N, T, S]
    """Look up the bias of each head for each distance (Raffel et al. 2020, section 2.1)."""
    last = config.max_distance
    buckets = np.array([config.bucket(distance) for distance in range(-last, last + 1)])
    distance = jnp.clip(key_positions[:, None, :] - query_positions[:, :, None], -last, last)
    return jnp.moveaxis(table[jnp.asarray(buckets)[distance + last]], -1, 1)


class RelativeTables(struct.PyTreeNode):
    """The tables a^K and a^V of one layer (Shaw et al. 2018).

    Rows are selected by products with one-hot vectors. The gradient of a product is a product;
    that of a gather would be a slow scatter-add over every head, query and key.
    """

    keys: jax.Array  # [R, H]
    values: jax.Array  # [R, H of values]

    def score_terms(
        self,
        q: jax.Array,  # [B, T, N, H]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
        dtype: DTypeLike,  # of the scores
    ) -> jax.Array:  # [B, N, T, S]
        """Return q_i . a^K_ij, the term of the scores (equation 4)."""
        rows, operand_dtype = (
            self.one_hot_distances(query_positions, key_positions),
            self.keys.dtype,
        )
        by_distance = precise_einsum("BTNH,RH->BNTR", q, self.keys, operand_dtype, dtype)
        return precise_einsum("BNTR,BTSR->BNTS", by_distance, rows, operand_dtype, dtype)

    def value_terms(
        self,
        weights: jax.Array,  # [B, N, T, S]
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
        dtype: DTypeLike,  # of the result
    ) -> jax.Array:  # [B, T, N, H of values]
        """Return the sum over j of weight_ij a^V_ij, the term of the result (equation 3)."""
        rows = self.one_hot_distances(query_positions, key_positions)
        operand_dtype = self.values.dtype
        by_distance = precise_einsum("BNTS,BTSR->BNTR", weights, rows, operand_dtype, dtype)
        return precise_einsum("BNTR,RH->BTNH", by_distance, self.values, operand_dtype, dtype)

    def one_hot_distances(
        self,
        query_positions: jax.Array,  # [B or 1, T]
        key_positions: jax.Array,  # [B or 1, S]
    ) -> jax.Array:  # [B or 1, T, S, R]
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
    shared_bias: jax.Array | None = None,  # [buckets, N] of `MixerInputs`
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
                    "t5_relative_bias.shared True: only encoder-decoders have a table for all "
                    "layers; set it to False"
                )
            else:
                table = shared_bias
            return PositionTerms(bias=functools.partial(t5_relative_bias, table, position))
        case RelativePositions():
            rows, dtype = {"distances": position.num_distances}, context.precision.compute
            tables = (
                _declare_table(module, name, rows | {"head": head_dim}, context)
                for name, head_dim in (
                    ("position_keys", key_head_dim),
                    ("position_values", value_head_dim),
                )
            )
            return PositionTerms(
                relative_tables=RelativeTables(*(table.astype(dtype) for table in tables))
            )
    return PositionTerms()


def declare_bias_table(
    module: nn.Module, position: T5RelativeBias, num_heads: int, context: ModelContext
) -> jax.Array:  # [buckets, N]
    """Declare the table `position_bias` of `module`."""
    outputs = {"buckets": position.num_buckets, "heads": num_heads}
    return _declare_table(module, "position_bias", outputs, context)


def find_shared_bias(pattern: Sequence[BlockConfig]) -> tuple[T5RelativeBias, int] | None:
    """Return the settings and the heads of the table that the layers of a stack share, if any.

    Raises:
      ValueError: Layers share a table and have different settings of it.
    """
    mixers: list[Any] = [block.mixer for block in pattern]
    biases = {
        (mixer.position, mixer.num_heads)
        for mixer in mixers
        if isinstance(getattr(mixer, "position", None), T5RelativeBias) and mixer.position.shared
    }
    if len(biases) > 1:
        raise ValueError(
            "t5_relative_bias.shared True: the layers have different buckets or heads; give all "
            "the same, or set it to False"
        )
    return biases.pop() if biases else None


def declare_shared_bias(
    module: nn.Module, pattern: Sequence[BlockConfig], context: ModelContext
) -> jax.Array | None:  # [buckets, N]
    """Declare the table that all layers of a stack share as a weight of `module`, if any."""
    config = find_shared_bias(pattern)
    return None if config is None else declare_bias_table(module, *config, context)


def zero_shared_bias(pattern: Sequence[BlockConfig]) -> jax.Array | None:  # [buckets, N]
    """Return zeros in the shape of the shared table, to initialize a layer alone."""
    config = find_shared_bias(pattern)
    return None if config is None else jnp.zeros((config[0].num_buckets, config[1]))


def _declare_table(
    module: nn.Module, name: str, outputs: dict[str, int], context: ModelContext
) -> jax.Array:  # as `outputs`
    # A table is not a linear map, as nothing is summed over its rows: all its axes are outputs.
    init, dtype = context.initialization.embedding_initializer(), context.precision.parameters
    return declare_weight(module, name, outputs=outputs, init=init, dtype=dtype)
