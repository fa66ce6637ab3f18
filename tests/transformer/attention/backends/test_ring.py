"""Ring attention equals the reference in values and gradients, with tokens in zigzag order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, assert_trees_close, normal
from train.parallel.context_parallel import zigzag_reorder
from train.parallel.mesh import MeshConfig, make_mesh
from train.parallel.sharding import make_sharding_constraint
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import attend
from transformer.attention.backends.ring import attend_ring
from transformer.attention.masks import dense_mask
from transformer.attention.reference import ScoreSpec, attend_reference

B, T, N, H, VALUES = 2, 32, 4, 5, 7
DOCUMENTS = np.array([[1] * 11 + [2] * 14 + [3] * 7, [1] * 28 + [0] * 4])
POSITIONS = np.array([[*range(11), *range(14), *range(7)], [*range(28)] + [0] * 4])


def inputs(kv_heads: int) -> tuple[Any, Any, Any]:
    return normal(0, B, T, N, H), normal(1, B, T, kv_heads, H), normal(2, B, T, kv_heads, VALUES)


def make_mask(pattern: MaskPattern, packed: bool) -> Mask:
    if packed:
        return Mask(pattern, positions=jnp.array(POSITIONS), segments=jnp.array(DOCUMENTS))
    return Mask(pattern, positions=jnp.tile(jnp.arange(T), (B, 1)))


def zigzag(tree: Any, count: int) -> Any:
    """Reorder the tokens of arrays [B, T, ...] as the ring distributes them over `count`
    devices.
    """
    return jax.tree.map(lambda x: jnp.array(zigzag_reorder({"x": np.asarray(x)}, count)["x"]), tree)


CAUSAL = MaskPattern(causal=True)


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
def test_matches_reference(
    mesh: MeshConfig, kv_heads: int, pattern: MaskPattern, packed: bool, scoring: ScoreSpec
) -> None:
    """One case has two key-value heads over four shards, each with one query head."""
    constrain = make_sharding_constraint(make_mesh(mesh))
    mask, arrays = make_mask(pattern, packed), inputs(kv_heads)
    g = normal(3, B, T, N, VALUES)

    def reference(q: Any, k: Any, v: Any, g: Any, mask: Mask) -> Any:
        y, _ = attend_reference(q, k, v, mask, scoring)
        return jnp.sum(y * g), y

    def ring(q: Any, k: Any, v: Any, g: Any, mask: Mask) -> Any:
        y = attend_ring(q, k, v, mask, scoring, constrain, block_size=3).y
        return jnp.sum(y * g), y

    arguments = (*arrays, g, mask)
    expected = jax.jit(jax.grad(reference, (0, 1, 2), has_aux=True))(*arguments)
    actual = jax.jit(jax.grad(ring, (0, 1, 2), has_aux=True))(*zigzag(arguments, mesh.context))
    assert_trees_close(actual, zigzag(expected, mesh.context), 1e-5)


def test_sinks_match_reference() -> None:
    constrain = make_sharding_constraint(make_mesh(MeshConfig(context=4)))
    operands, spec, sinks = (*inputs(2), make_mask(CAUSAL, True)), ScoreSpec(0.3), normal(4, N)
    kwargs: Any = dict(hardware=Hardware(), constrain=constrain, sink_logits=sinks)

    def ring(q: Any, k: Any, v: Any, mask: Mask) -> Any:
        return attend(q, k, v, mask, spec, **kwargs).y

    def reference(q: Any, k: Any, v: Any, mask: Mask) -> Any:
        return attend_reference(q, k, v, mask, spec, sinks)[0]

    actual, expected = jax.jit(ring)(*zigzag(operands, 4)), jax.jit(reference)(*operands)
    assert_close(actual, zigzag(expected, 4), 1e-5)


@pytest.mark.full
def test_backward_pass_drops_the_same_weights() -> None:
    """The output is linear in v, so the derivative of its squared sum along v is twice the sum."""
    constrain = make_sharding_constraint(make_mesh(MeshConfig(data=2, context=4)))
    q, k, v = inputs(N)
    score_spec = ScoreSpec(
        0.3, dropout_rate=0.5, dropout_rngs=jax.random.split(jax.random.key(0), B)
    )
    run = functools.partial(
        attend_ring, mask=make_mask(CAUSAL, False), score_spec=score_spec, block_size=8
    )
    total = lambda v: jnp.sum(run(q, k, v, constrain=constrain).y ** 2)  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(total))(v)
    assert_close(jnp.sum(gradient * v), 2 * value, 1e-5)
    without_dropout, _ = attend_reference(q, k, v, make_mask(CAUSAL, False), ScoreSpec(0.3))
    assert np.abs(np.asarray(jnp.sum(without_dropout**2) - value)) > 0.1


def test_causal_work_is_balanced_over_devices() -> None:
    """Every device has the same number of visible query-key pairs."""
    reordered = zigzag(make_mask(CAUSAL, False), 4)
    visible = np.asarray(dense_mask(reordered.with_keys(reordered.positions), T, T))[0]
    pairs_per_device = visible.reshape(4, T // 4, T).sum((1, 2))
    assert set(pairs_per_device.tolist()) == {T * (T + 1) // 2 // 4}


def test_unsupported_settings_raise() -> None:
    constrain = make_sharding_constraint(make_mesh(MeshConfig(context=8)))
    q, k, v = inputs(N)
    kwargs: Any = dict(hardware=Hardware(), constrain=constrain)
    biased = ScoreSpec(0.3, bias=lambda q, k: jnp.zeros((1, N, T, T)))
    with pytest.raises(ValueError, match="spread over 8 devices: it supports dot products only"):
        attend(q, k, v, Mask(), biased, **kwargs)
    with pytest.raises(ValueError, match=r"attention.backend cudnn: .* set mesh.context to 1"):
        attend(q, k, v, Mask(), ScoreSpec(0.3), backend="cudnn", **kwargs)
    # A length that the mesh does not divide is computed on one device.
    q, k, v = (each[:, :3] for each in (q, k, v))
    run = jax.jit(lambda q, k, v: attend(q, k, v, Mask(), ScoreSpec(0.3), **kwargs).y)
    reference = jax.jit(lambda q, k, v: attend_reference(q, k, v, Mask(), ScoreSpec(0.3))[0])
    assert_close(run(q, k, v), reference(q, k, v), 0)
