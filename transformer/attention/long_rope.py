"""Angles of LongRoPE, whose frequencies depend on the length of the input (Ding et al. 2024)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer.attention.position_config import RoPE
from transformer.attention.rope_scaling import LongRoPEScaling


def long_rope_angles(
    positions: jax.Array,  # [B, T]
    rotary_dim: int,  # R
    config: RoPE,
    angles_of: Callable[[jax.Array, int, RoPE], jax.Array],  # for one set of factors
) -> jax.Array:  # [B, T, R / 2] float32
    """Return angles by the short factors, or by the long ones in rows longer than training.

    A row's last position decides for all of it: the score of a query and a key depends on their
    distance alone only if both are rotated by the same frequencies.
    """
    scaling = config.scaling
    assert isinstance(scaling, LongRoPEScaling)  # checked by the caller
    is_long = jnp.max(positions, axis=-1)[:, None, None] >= scaling.original_max_length
    rules = (
        dataclasses.replace(config, scaling=dataclasses.replace(scaling, factors=factors))
        for factors in ("long", "short")
    )
    long, short = (angles_of(positions, rotary_dim, rule) for rule in rules)
    return jnp.where(is_long, long, short)
