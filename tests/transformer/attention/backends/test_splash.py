"""The TPU splash kernel, interpreted, equals the reference.

`bench.drills.splash` compiles it for TPUs.
"""

from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import assert_trees_close, normal
from tests.transformer.mixers import value_and_gradients
from train.parallel.mesh import MeshConfig, make_mesh
from train.parallel.sharding import make_sharding_constraint
from transformer import Mask, MaskPattern
from transformer.attention.backends.splash import attend_splash
from transformer.attention.reference import ScoreSpec, attend_reference

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
    actual = value_and_gradients(
        lambda q, k, v: attend_splash(q, k, v, mask, scoring, interpret=True), *arrays
    )
    chex.assert_tree_all_finite(actual)
    reference = lambda q, k, v: attend_reference(q, k, v, mask, scoring)[0]  # noqa: E731
    assert_trees_close(actual, value_and_gradients(reference, *arrays))


@pytest.mark.full
def test_sharded_kernel_matches_reference() -> None:
    """Batch rows and heads are sharded; two key-value heads serve four shards of query heads."""
    constrain = make_sharding_constraint(make_mesh(MeshConfig(data=2, tensor=4)))
    arrays = normal(0, B, T, N, H), normal(1, B, T, 2, H), normal(2, B, T, 2, H)
    mask = Mask(MaskPattern(causal=True), segments=jnp.array(documents()))

    def run(q: Any, k: Any, v: Any) -> Any:
        return attend_splash(q, k, v, mask, ScoreSpec(0.3), constrain=constrain, interpret=True)

    reference = lambda q, k, v: attend_reference(q, k, v, mask, ScoreSpec(0.3))[0]  # noqa: E731
    assert_trees_close(value_and_gradients(run, *arrays), value_and_gradients(reference, *arrays))
