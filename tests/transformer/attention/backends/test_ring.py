"""Attention in a ring is the reference, in values and gradients, whatever the order of tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, assert_trees_close, normal
from train.parallel.context_parallel import zigzag_reorder
from train.parallel.mesh import MeshConfig, make_mesh
from train.parallel.model_sharding import make_sharding_constraint
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import ScoreSpec, attend, attend_reference
from transformer.attention.backends.ring import attend_ring
from transformer.attention.masks import dense_mask

B, T, N, H, VALUES = 2, 32, 4, 5, 7
DOCUMENTS = np.array([[1] * 11 + [2] * 14 + [3] * 7, [1] * 28 + [0] * 4])
PLACES = np.array([[*range(11), *range(14), *range(7)], [*range(28)] + [0] * 4])


def inputs(kv_heads: int) -> tuple[Any, Any, Any]:
    return normal(0, B, T, N, H), normal(1, B, T, kv_heads, H), normal(2, B, T, kv_heads, VALUES)


def mask_of(pattern: MaskPattern, packed: bool) -> Mask:
    if packed:
        return Mask(pattern, positions=jnp.array(PLACES), segments=jnp.array(DOCUMENTS))
    return Mask(pattern, positions=jnp.tile(jnp.arange(T), (B, 1)))


def in_ring_order(tree: Any, count: int) -> Any:
    """[B, T, ...] with tokens as `count` devices take them."""
    return jax.tree.map(lambda x: jnp.array(zigzag_reorder({"x": np.asarray(x)}, count)["x"]), tree)


CAUSAL = MaskPattern(causal=True)


@pytest.mark.slow
@pytest.mark.sampled("packed", "capped")
@pytest.mark.parametrize(
    ("mesh", "kv_heads", "pattern", "packed", "scoring"),
    [
        (MeshConfig(data=2, context=4), N, CAUSAL, True, ScoreSpec(0.3)),
        (MeshConfig(data=1, context=2, tensor=4), 2, CAUSAL, False, ScoreSpec(0.3)),
        (
            MeshConfig(data=1, expert=2, context=2, tensor=2),
            2,
            CAUSAL,
            True,
            ScoreSpec(3, soft_cap=2),
        ),
        (MeshConfig(data=1, context=8), 1, MaskPattern(window=6), True, ScoreSpec(0.3)),
    ],
    ids=["packed", "shared keys", "capped", "window"],
)
def test_reference(
    mesh: MeshConfig, kv_heads: int, pattern: MaskPattern, packed: bool, scoring: ScoreSpec
) -> None:
    """Two key-value heads over four shards, each with one query head."""
    constrain = make_sharding_constraint(make_mesh(mesh))
    mask, given = mask_of(pattern, packed), inputs(kv_heads)
    g = normal(3, B, T, N, VALUES)

    def plain(q: Any, k: Any, v: Any, g: Any, mask: Mask) -> Any:
        y, _ = attend_reference(q, k, v, mask, scoring)
        return jnp.sum(y * g), y

    def around(q: Any, k: Any, v: Any, g: Any, mask: Mask) -> Any:
        y = attend_ring(q, k, v, mask, scoring, constrain, block_size=3).y
        return jnp.sum(y * g), y

    values = (*given, g, mask)
    expected = jax.jit(jax.grad(plain, (0, 1, 2), has_aux=True))(*values)
    found = jax.jit(jax.grad(around, (0, 1, 2), has_aux=True))(*in_ring_order(values, mesh.context))
    assert_trees_close(found, in_ring_order(expected, mesh.context), 1e-5)


def test_sinks() -> None:
    constrain, mask = (
        make_sharding_constraint(make_mesh(MeshConfig(context=4))),
        mask_of(CAUSAL, True),
    )
    sinks = normal(4, N)
    given, scoring = (*inputs(2), mask), ScoreSpec(0.3)
    expected, _ = jax.jit(lambda q, k, v, mask: attend_reference(q, k, v, mask, scoring, sinks))(
        *given
    )
    how: Any = dict(hardware=Hardware(), constrain=constrain, sink_logits=sinks)
    turned = in_ring_order(given, 4)
    found = jax.jit(lambda q, k, v, mask: attend(q, k, v, mask, scoring, **how).y)(*turned)
    assert_close(found, in_ring_order(expected, 4), 1e-5)


@pytest.mark.slow
def test_weights_are_dropped_alike_forward_and_backward() -> None:
    """The layer is linear in the values: its derivative along them is itself."""
    constrain = make_sharding_constraint(make_mesh(MeshConfig(data=2, context=4)))
    q, k, v = inputs(N)
    scoring = ScoreSpec(0.3, dropout_rate=0.5, dropout_rngs=jax.random.split(jax.random.key(0), B))
    look = functools.partial(
        attend_ring, mask=mask_of(CAUSAL, False), score_spec=scoring, block_size=8
    )
    total = lambda v: jnp.sum(look(q, k, v, constrain=constrain).y ** 2)  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(total))(v)
    assert_close(jnp.sum(gradient * v), 2 * value, 1e-5)
    whole, _ = attend_reference(q, k, v, mask_of(CAUSAL, False), ScoreSpec(0.3))
    assert np.abs(np.asarray(jnp.sum(whole**2) - value)) > 0.1


def test_a_causal_mask_leaves_as_much_to_each_part() -> None:
    """Pairs of a query and a key that it sees, of the tokens that a device has."""
    turned = in_ring_order(mask_of(CAUSAL, False), 4)
    seen = np.asarray(dense_mask(turned.with_keys(turned.positions), T, T))[0]
    each = seen.reshape(4, T // 4, T).sum((1, 2))
    assert set(each.tolist()) == {T * (T + 1) // 2 // 4}


def test_what_cannot_go_around() -> None:
    constrain = make_sharding_constraint(make_mesh(MeshConfig(context=8)))
    q, k, v = inputs(N)
    how: Any = dict(hardware=Hardware(), constrain=constrain)
    biased = ScoreSpec(0.3, bias=lambda q, k: jnp.zeros((1, N, T, T)))
    with pytest.raises(ValueError, match="spread over 8 devices: it supports dot products only"):
        attend(q, k, v, Mask(), biased, **how)
    with pytest.raises(ValueError, match=r"attention.backend cudnn: .* set mesh.context to 1"):
        attend(q, k, v, Mask(), ScoreSpec(0.3), backend="cudnn", **how)
    # What does not divide is not spread.
    few = attend(q[:, :3], k[:, :3], v[:, :3], Mask(), biased._replace(bias=None), **how)
    assert_close(
        few.y, attend_reference(q[:, :3], k[:, :3], v[:, :3], Mask(), ScoreSpec(0.3))[0], 0
    )
