"""The TPU splash kernel, interpreted, equals the reference.

`bench.drills.splash` compiles it for TPUs.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, assert_trees_close, normal
from train.parallel.mesh import MeshConfig, make_mesh
from train.parallel.sharding import make_sharding_constraint
from transformer import Mask, MaskPattern
from transformer.attention.attend import ScoreSpec, attend_reference
from transformer.attention.backends.splash import attend_splash

B, T, N, H = 2, 193, 4, 24


def documents() -> Any:  # [B, T]
    starts = np.array([[60, 150], [3, 190]])
    segments = 1 + (np.arange(T)[None, :, None] >= starts[:, None]).sum(-1)
    return np.where(segments == 3, 0, segments)


CASES: dict[str, Any] = {
    "causal": (Mask(MaskPattern(causal=True)), 4, ScoreSpec(0.3)),
    "causal documents": (Mask(MaskPattern(causal=True), segments=documents()), 2, ScoreSpec(0.3)),
    "both ways, padded": (Mask(segments=documents()), 4, ScoreSpec(0.3)),
    "both ways": (Mask(), 1, ScoreSpec(0.3)),
    "window": (Mask(MaskPattern(causal=True, window=37)), 2, ScoreSpec(0.3)),
    "window both ways, capped": (Mask(MaskPattern(window=21)), 4, ScoreSpec(3.0, soft_cap=2.0)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_matches_reference(name: str) -> None:
    mask, kv_heads, scoring = CASES[name]
    arrays = normal(0, B, T, N, H), normal(1, B, T, kv_heads, H), normal(2, B, T, kv_heads, H)
    cotangent = normal(3, B, T, N, H)

    def run(kernel: bool, q: Any, k: Any, v: Any) -> Any:
        if kernel:
            return attend_splash(q, k, v, mask, scoring, interpret=True)
        return attend_reference(q, k, v, mask, scoring)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def both(kernel: bool) -> Any:
        y, vjp_fn = jax.vjp(functools.partial(run, kernel), *arrays)
        return y, vjp_fn(cotangent)

    actual = both(True)
    chex.assert_tree_all_finite(actual)
    assert_trees_close(actual, both(False))


@pytest.mark.full
def test_sharded_kernel_matches_reference() -> None:
    """Batch rows and heads are sharded; two key-value heads serve four shards of query heads."""
    constrain = make_sharding_constraint(make_mesh(MeshConfig(data=2, tensor=4)))
    arrays = normal(0, B, T, N, H), normal(1, B, T, 2, H), normal(2, B, T, 2, H)
    mask = Mask(MaskPattern(causal=True), segments=jnp.array(documents()))

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend_splash(q, k, v, mask, ScoreSpec(0.3), constrain=constrain, interpret=True)

    actual = jax.jit(lambda *x: jax.vjp(run, *x)[1](arrays[0]))(*arrays)

    def reference(q: Any, k: Any, v: Any) -> Any:
        return attend_reference(q, k, v, mask, ScoreSpec(0.3))[0]

    expected = jax.jit(lambda *x: jax.vjp(reference, *x)[1](arrays[0]))(*arrays)
    for result, wanted in zip(actual, expected, strict=True):
        assert_close(result, wanted)
