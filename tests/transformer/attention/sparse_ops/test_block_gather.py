"""Attention over chosen blocks is softmax over their keys, in values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal
from transformer import Mask, MaskPattern
from transformer.attention.attend import ScoreSpec
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.tiling import merge_partials
from transformer.attention.masks import dense_mask
from transformer.attention.sparse_ops import block_gather
from transformer.attention.sparse_ops.block_gather import attend_selected_blocks
from transformer.testing.trial import reference_softmax_attention

B, N, K, H, VALUES, BLOCK = 2, 4, 2, 4, 3, 5


def inputs(queries: int, keys: int) -> tuple[Any, Any, Any]:
    """Scaled so that 1 / sqrt(H) of the oracle is the scale of the scores."""
    return (
        normal(0, B, queries, N, H),
        normal(1, B, keys, K, H),
        normal(2, B, keys, K, VALUES),
    )


def chosen(tables: tuple[int, int], queries: int, keys: int, count: int = 3) -> Any:
    """Distinct blocks, every third entry without one."""
    random, blocks = np.random.default_rng(3), -(-keys // BLOCK)
    table = np.full((*tables, -(-queries // BLOCK), count), -1)
    for index in np.ndindex(*table.shape[:3]):
        table[index] = random.permutation(blocks)[:count]
    return np.where(random.random(table.shape) < 0.3, -1, table)


def shown(table: Array, queries: int, keys: int) -> Array:  # [B or 1, N or 1, T, S] booleans
    blocks = np.arange(keys) // BLOCK
    seen = (table[..., None] == blocks).any(-2)
    return np.asarray(np.repeat(seen, BLOCK, axis=2)[:, :, :queries])


def documents(length: int) -> Any:  # [B, T]
    starts = np.array([[9, 20, length - 4], [0, 17, length]])
    segments = 1 + (np.arange(length)[None, :, None] >= starts[:, None]).sum(-1)
    return np.where(segments == 4, 0, segments)


CASES: dict[str, Any] = {
    "a table for each head of each example": (37, 37, Mask(), (B, N)),
    "packed and causal": (37, 37, Mask(MaskPattern(causal=True), segments=documents(37)), (1, N)),
    "lengths, keys of another source": (23, 41, Mask(key_lengths=array([41, 18])), (1, 1)),
}


def softmax(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """The formula, so that it can be differentiated."""
    k, v = (jnp.repeat(each, N // K, axis=2) for each in (k, v))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / H**0.5
    raised = jnp.where(seen, jnp.exp(scores), 0)
    total = raised.sum(-1, keepdims=True)
    return jnp.einsum("BNTS,BSNH->BTNH", raised / jnp.where(total > 0, total, 1), v)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_softmax(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several steps of several blocks, the last of them not full."""
    monkeypatch.setattr(block_gather, "QUERIES_PER_STEP", 3 * BLOCK)
    queries, keys, mask, tables = CASES[case]
    arrays, table = inputs(queries, keys), chosen(tables, queries, keys)
    seen = shown(table, queries, keys) & np.asarray(dense_mask(mask, queries, keys))[:, None]

    def blocks(q: Any, k: Any, v: Any) -> Any:
        return attend_selected_blocks(q, k, v, mask, ScoreSpec(H**-0.5), table, BLOCK).y

    def both(run: Any) -> Any:
        def inner(*arrays: Any) -> Any:
            y, pull = jax.vjp(run, *arrays)
            return y, pull(jnp.cos(3 * y))

        return jax.jit(inner)(*arrays)

    (y, gradients), (_, wanted) = both(blocks), both(lambda q, k, v: softmax(q, k, v, seen))
    assert not seen.any(-1).all()  # some queries see nothing
    assert_close(y, reference_softmax_attention(*arrays, seen))
    for got, want in zip(gradients, wanted, strict=True):
        assert_close(got, want)


@pytest.mark.slow
def test_merged_with_the_other_blocks_it_is_full_attention() -> None:
    """This also tests the log-sum-exp and its gradients."""
    queries = keys = 23
    arrays, blocks = inputs(queries, keys), -(-keys // BLOCK)
    split: Any = np.random.default_rng(1).permuted(
        np.tile(np.arange(blocks), (1, N, blocks, 1)), axis=3
    )
    parts: Any = (split[..., :2], split[..., 2:])

    scoring = ScoreSpec(H**-0.5)

    def merged(q: Any, k: Any, v: Any) -> Any:
        looked = [attend_selected_blocks(q, k, v, Mask(), scoring, part, BLOCK) for part in parts]
        return merge_partials(looked).y

    def loss(run: Any) -> Any:
        return jax.jit(jax.grad(lambda *arrays: jnp.sin(run(*arrays)).sum(), (0, 1, 2)))(*arrays)

    def full(q: Any, k: Any, v: Any) -> Any:
        return attend_blockwise(q, k, v, Mask(), scoring).y

    for got, want in zip(loss(merged), loss(full), strict=True):
        assert_close(got, want)


def test_dropped_weights_are_dropped_again_in_the_backward_pass() -> None:
    """The result is linear in the values: a difference is the gradient's, but for rounding."""
    q, k, v = inputs(37, 37)
    table = chosen((1, N), 37, 37)
    scoring = ScoreSpec(0.3, dropout_rate=0.5, dropout_rngs=jax.random.split(jax.random.key(0), B))

    @jax.jit
    def total(v: Any) -> Any:
        y = attend_selected_blocks(q, k, v, Mask(), scoring, table, BLOCK).y
        return (y * normal(5, B, 37, N, VALUES)).sum()

    step = normal(6, *v.shape)
    moved, gradient = total(v + step) - total(v), jax.jit(jax.grad(total))(v)
    assert float(moved) == pytest.approx(float((gradient * step).sum()), rel=1e-3)


def test_no_square_array_is_ever_made() -> None:
    length, block = 1024, 16
    q, k, v = inputs(length, length)
    table = np.arange(length // block)[None, None, :, None] + np.array([-1, 0])

    def total(q: Any, k: Any, v: Any) -> Any:
        return attend_selected_blocks(q, k, v, Mask(), ScoreSpec(0.3), table, block).y.sum()

    program: Any = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, v).compile().as_text()
    assert f"{length},{length}]" not in program
    assert f"{block},{2 * block}]" in program


def test_refusals() -> None:
    (q, k, v), table = inputs(23, 23), chosen((1, 1), 23, 23)
    with pytest.raises(ValueError, match=r"^selected blocks: support dot-product scores only"):
        attend_selected_blocks(q, k, v, Mask(), ScoreSpec(1.0, soft_cap=2.0), table, BLOCK)
    with pytest.raises(ValueError, match=r"^selected blocks: do not support masks with a prefix"):
        attend_selected_blocks(
            q, k, v, Mask(global_positions=array([[1]])), ScoreSpec(1.0), table, BLOCK
        )
