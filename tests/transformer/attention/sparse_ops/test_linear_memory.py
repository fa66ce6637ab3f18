"""Compiled programs of sparse attention have no array of T x T, forward or backward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.compiled import largest_array
from transformer import Mask, MaskPattern
from transformer.attention.reference import ScoreSpec
from transformer.attention.sparse_ops.block_gather import attend_selected_blocks
from transformer.attention.sparse_ops.grouped_window import attend_grouped
from transformer.attention.variants.top_k import attend_top_k

T, SPEC = 2048, ScoreSpec(1.0)
CAUSAL = Mask(MaskPattern(causal=True))
TABLE = np.arange(T // 16)[None, None, :, None] + np.array([-1, 0])

OPERATIONS: dict[str, Callable[..., Any]] = {
    "top k": lambda q, k, v, groups: attend_top_k(q, k, v, CAUSAL, SPEC, 8, block_size=16),
    "blocks": lambda q, k, v, groups: attend_selected_blocks(q, k, v, CAUSAL, SPEC, TABLE, 16).y,
    "groups": lambda q, k, v, g: attend_grouped(q, k, v, g, 16, causal=True, scale=1.0).y,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_is_linear_in_length(name: str) -> None:
    arrays = [jax.ShapeDtypeStruct((1, T, 1, 2), np.float32)] * 3
    groups = jax.ShapeDtypeStruct((1, 1, T), np.int32)

    def total(*given: Any) -> jax.Array:
        return jnp.sum(jnp.sin(OPERATIONS[name](*given)))

    assert largest_array(jax.grad(total, (0, 1, 2)), *arrays, groups) <= 32 * T
