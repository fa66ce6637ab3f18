"""Attention over selected blocks equals softmax over their keys, in values and gradients."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_trees_close, normal
from tests.transformer.mixers import dense_attention, value_and_gradients
from transformer import Mask, MaskPattern
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.partial import merge_partials
from transformer.attention.masks import dense_mask
from transformer.attention.reference import ScoreSpec
from transformer.attention.sparse_ops import block_gather
from transformer.attention.sparse_ops.block_gather import attend_selected_blocks

B, N, K, H, VALUES, BLOCK = 2, 4, 2, 4, 3, 5


def inputs(queries: int, keys: int) -> tuple[Any, Any, Any]:
    """Return arrays whose score scale is the 1 / sqrt(H) of `reference_softmax_attention`."""
    return (
        normal(0, B, queries, N, H),
        normal(1, B, keys, K, H),
        normal(2, B, keys, K, VALUES),
    )


def random_block_table(tables: tuple[int, int], queries: int, keys: int, count: int = 3) -> Any:
    """Return a table of distinct blocks; about a third of the entries are empty (-1)."""
    random, blocks = np.random.default_rng(3), -(-keys // BLOCK)
    table = np.full((*tables, -(-queries // BLOCK), count), -1)
    for index in np.ndindex(*table.shape[:3]):
        table[index] = random.permutation(blocks)[:count]
    return np.where(random.random(table.shape) < 0.3, -1, table)


def visible_pairs(
    table: Array, queries: int, keys: int
) -> Array:  # [B or 1, N or 1, T, S] booleans
    blocks = np.arange(keys) // BLOCK
    visible = (table[..., None] == blocks).any(-2)
    return np.asarray(np.repeat(visible, BLOCK, axis=2)[:, :, :queries])


def documents(length: int) -> Any:  # [B, T]
    starts = np.array([[9, 20, length - 4], [0, 17, length]])
    segments = 1 + (np.arange(length)[None, :, None] >= starts[:, None]).sum(-1)
    return np.where(segments == 4, 0, segments)


CASES: dict[str, Any] = {
    "a table for each head of each example": (37, 37, Mask(), (B, N)),
    "packed and causal": (37, 37, Mask(MaskPattern(causal=True), segments=documents(37)), (1, N)),
    "lengths, keys of another source": (23, 41, Mask(key_lengths=array([41, 18])), (1, 1)),
}


@pytest.mark.sampled("packed")
@pytest.mark.parametrize("case", CASES)
def test_matches_dense_attention(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps of several blocks, the last step not full."""
    monkeypatch.setattr(block_gather, "QUERIES_PER_STEP", 3 * BLOCK)
    queries, keys, mask, tables = CASES[case]
    arrays, table = inputs(queries, keys), random_block_table(tables, queries, keys)
    visible = (
        visible_pairs(table, queries, keys) & np.asarray(dense_mask(mask, queries, keys))[:, None]
    )

    def selected_blocks(q: Any, k: Any, v: Any) -> Any:
        return attend_selected_blocks(q, k, v, mask, ScoreSpec(H**-0.5), table, BLOCK).y

    assert not visible.any(-1).all()  # some queries have no visible key
    assert_trees_close(
        value_and_gradients(selected_blocks, *arrays),
        value_and_gradients(lambda q, k, v: dense_attention(q, k, v, visible), *arrays),
    )


@pytest.mark.full
def test_merged_with_remaining_blocks_is_full_attention() -> None:
    """Also tests the log-sum-exp and its gradients."""
    queries = keys = 23
    arrays, blocks = inputs(queries, keys), -(-keys // BLOCK)
    shuffled: Any = np.random.default_rng(1).permuted(
        np.tile(np.arange(blocks), (1, N, blocks, 1)), axis=3
    )
    parts: Any = (shuffled[..., :2], shuffled[..., 2:])

    score_spec = ScoreSpec(H**-0.5)

    def merged(q: Any, k: Any, v: Any) -> Any:
        partials = [
            attend_selected_blocks(q, k, v, Mask(), score_spec, part, BLOCK) for part in parts
        ]
        return merge_partials(partials).y

    def full(q: Any, k: Any, v: Any) -> Any:
        return attend_blockwise(q, k, v, Mask(), score_spec).y

    assert_trees_close(value_and_gradients(merged, *arrays), value_and_gradients(full, *arrays))


def test_backward_pass_drops_the_same_weights() -> None:
    """The output is linear in v, so a finite difference equals the gradient up to rounding."""
    q, k, v = inputs(37, 37)
    table = random_block_table((1, N), 37, 37)
    score_spec = ScoreSpec(
        0.3, dropout_rate=0.5, dropout_rngs=jax.random.split(jax.random.key(0), B)
    )

    @jax.jit
    def total(v: Any) -> Any:
        y = attend_selected_blocks(q, k, v, Mask(), score_spec, table, BLOCK).y
        return (y * normal(5, B, 37, N, VALUES)).sum()

    step = normal(6, *v.shape)
    difference, gradient = total(v + step) - total(v), jax.jit(jax.grad(total))(v)
    assert float(difference) == pytest.approx(float((gradient * step).sum()), rel=1e-3)
