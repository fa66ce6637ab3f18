"""What positions add to attention: a bias of the scores, or tables for keys and values."""

import functools
from typing import NamedTuple

import jax
from flax import linen as nn

from transformer.attend import BiasFn
from transformer.positions import (
    ALiBi,
    AttentionPosition,
    RelativePositions,
    RelativeTables,
    T5RelativeBias,
    alibi_bias,
    t5_relative_bias,
)
from transformer.shared import ModelContext
from transformer.weights import declare_weight


class PositionTerms(NamedTuple):
    """As `attend` takes it."""

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
) -> PositionTerms:
    """What the kind of positions says, its tables declared as weights of `module`."""
    match position:
        case ALiBi():
            return PositionTerms(bias=functools.partial(alibi_bias, num_heads))
        case T5RelativeBias():
            outputs = {"buckets": position.num_buckets, "heads": num_heads}
            table = _table(module, "position_bias", outputs, context)
            return PositionTerms(bias=functools.partial(t5_relative_bias, table, position))
        case RelativePositions():
            rows = {"distances": position.num_distances}
            keys = _table(module, "position_keys", rows | {"head": key_head_dim}, context)
            values = _table(module, "position_values", rows | {"head": value_head_dim}, context)
            dtype = context.precision.compute
            return PositionTerms(
                relative_tables=RelativeTables(keys.astype(dtype), values.astype(dtype))
            )
    return PositionTerms()


def _table(
    module: nn.Module, name: str, outputs: dict[str, int], shared: ModelContext
) -> jax.Array:  # as `outputs`
    """A table is no linear map: nothing is summed over its rows, so it has no inputs."""
    init, dtype = shared.initialization.embedding_initializer(), shared.precision.parameters
    return declare_weight(module, name, outputs=outputs, init=init, dtype=dtype)
