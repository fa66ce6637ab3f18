"""ALiBi: scores fall with the distance, at a fixed slope for each head.

T5's bias of the scores by the distance's bucket.

What positions add to attention: a bias of the scores, or tables for keys and values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    import numpy as np
if TYPE_CHECKING:
    import jax
import functools
from typing import NamedTuple

import jax
from flax import linen as nn

from transformer.attention.position_config import (
    ALiBi,
    AttentionPosition,
    RelativePositions,
    T5RelativeBias,
)
from transformer.attention.score_spec import BiasFn, RelativeTables
from transformer.context import ModelContext
from transformer.layers.params import declare_weight


def alibi_slopes(num_heads: int) -> np.ndarray:  # [N]
    """2^(-8 n / N) for head n = 1 to N, as in section 3.

    If N is no power of two: those of the power below it, then every second of twice as many, as in
    the authors' code.
    """
    import numpy as np

    power = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power, 2) / (2 * power))
    return np.concatenate([slopes, between[: num_heads - power]])


def alibi_bias(
    num_heads: int,
    query_positions: jax.Array,  # [B or 1, T]
    key_positions: jax.Array,  # [B or 1, S]
) -> jax.Array:  # [B or 1, N, T, S] float32
    """What is added to the scores of each head."""
    import jax.numpy as jnp

    slopes = jnp.asarray(alibi_slopes(num_heads), jnp.float32)[None, :, None, None]
    return -slopes * jnp.abs(key_positions[:, None, :] - query_positions[:, :, None])[:, None]


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
