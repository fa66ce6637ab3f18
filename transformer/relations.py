"""What positions add to attention: a bias of the scores, or tables for keys and values."""

import functools
from typing import NamedTuple

import jax
from flax import linen as nn

from transformer.attend import Bias
from transformer.positions import (
    ALiBi,
    AttentionPosition,
    BucketedBias,
    RelativePositions,
    RelativeTables,
    alibi_bias,
    bucketed_bias,
)
from transformer.shared import Shared
from transformer.weights import weight


class Relation(NamedTuple):
    """As `attend` takes it."""

    bias: Bias | None = None
    relative: RelativeTables | None = None


def relation(
    module: nn.Module,
    position: AttentionPosition,
    shared: Shared,
    *,
    heads: int,  # N
    key_width: int,  # H
    value_width: int,  # H of values
) -> Relation:
    """What the kind of positions says, its tables declared as weights of `module`."""
    match position:
        case ALiBi():
            return Relation(bias=functools.partial(alibi_bias, heads))
        case BucketedBias():
            outputs = {"buckets": position.buckets, "heads": heads}
            table = _table(module, "position_bias", outputs, shared)
            return Relation(bias=functools.partial(bucketed_bias, table, position))
        case RelativePositions():
            rows = {"distances": position.distances}
            keys = _table(module, "position_keys", rows | {"head": key_width}, shared)
            values = _table(module, "position_values", rows | {"head": value_width}, shared)
            dtype = shared.precision.compute
            return Relation(relative=RelativeTables(keys.astype(dtype), values.astype(dtype)))
    return Relation()


def _table(
    module: nn.Module, name: str, outputs: dict[str, int], shared: Shared
) -> jax.Array:  # as `outputs`
    """A table is no linear map: nothing is summed over its rows, so it has no inputs."""
    init, dtype = shared.initialization.table(), shared.precision.parameters
    return weight(module, name, outputs=outputs, init=init, dtype=dtype)
