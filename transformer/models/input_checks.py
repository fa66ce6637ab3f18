"""Checks of a model's inputs beyond their shapes: lengths, positions, token ids and caches."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from transformer.config import TransformerConfig
from transformer.shapes import check_shapes


def check_length(
    tokens: jax.Array,  # [B, T]
    config: TransformerConfig,
    positions: jax.Array | None = None,  # [B or 1, T]
) -> None:
    """Raise ValueError if tokens or positions exceed a table of learned positions.

    Positions that are traced have no values yet and are not checked.
    """
    limit = config.max_length
    if limit is None:
        return
    if tokens.shape[1] > limit:
        raise ValueError(
            f"{tokens.shape[1]} tokens: the table of learned positions has {limit} rows; "
            "give shorter inputs or a longer table"
        )
    if positions is None or isinstance(positions, jax.core.Tracer):
        return
    last = int(np.asarray(positions).max(initial=-1))
    if last >= limit:
        raise ValueError(
            f"position {last}: the table of learned positions has {limit} rows, from 0; give "
            "smaller positions or a longer table"
        )


def check_token_ids(
    name: str,
    tokens: Sequence[int] | np.ndarray,  # [T]
    vocab_size: int,
    if_empty: str = "give it at least one token",
) -> None:
    """Raise ValueError unless `tokens` is a sequence of one or more ids below `vocab_size`."""
    row = np.asarray(tokens)
    if not row.size:
        raise ValueError(f"{name}: is empty; {if_empty}")
    check_shapes(**{name: (row, "T", int)})
    for token in (row.min(), row.max()):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name}: token {token} is not one of the model's {vocab_size:,}; use the "
                "tokenizer that it was trained with"
            )


def check_cache_inputs(
    cache: Any,
    positions: jax.Array | None,
    segments: jax.Array | None,
) -> None:
    """Raise ValueError for inputs that do not go with a cache."""
    if cache is not None and positions is None:
        raise ValueError("a cache without positions: give the positions of the new tokens")
    if cache is not None and segments is not None:
        raise ValueError("a cache with segments: decode one document for each example")
