"""States that the checkpoint tests save, and their comparison."""

import functools
import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from train.checkpoint.manager import CheckpointManager


class State(struct.PyTreeNode):
    step: jax.Array
    params: Any
    optimizer: Any
    key: jax.Array
    loss_scale: Any = None


@functools.partial(jax.jit, static_argnames=("width", "seed"))
def make_state(width: int = 7, seed: int = 0) -> State:
    key = jax.random.key(seed)
    params = {
        "embed": {"table": jax.random.normal(key, (11, width))},
        "half": jax.random.normal(key, (3, width), jnp.bfloat16),
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45, 3.0], jnp.float32),
        "empty": jnp.zeros((0, 5)),
    }
    optimizer = optax.adamw(1e-3).init(params)
    return State(jnp.int32(seed), params, optimizer, key)


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def bits(leaf: jax.Array) -> bytes:
    raw = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(raw).tobytes()


def assert_same(actual: Any, expected: Any) -> None:
    """Assert equal structure, types and bits, NaN included."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal_comparator(
        lambda a, b: bits(a) == bits(b), lambda a, b: f"{a} is not {b}", actual, expected
    )


def save(folder: pathlib.Path, state: Any, step: int = 1) -> None:
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(step, state, {})
