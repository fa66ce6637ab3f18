"""Reformer's attention against softmax in NumPy with the same hash rotations."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_trees_close, normal
from tests.transformer.mixers import (
    apply_mixer,
    axes,
    make_mixer,
    project_and_select,
    value_and_gradients,
    visible_in_groups,
)
from transformer import Mask, MaskPattern, ReformerConfig
from transformer.attention.mixer import MixerInputs
from transformer.attention.variants.reformer import Reformer

B, T, D, N, H, WINDOW, ROUNDS = 2, 71, 7, 2, 5, 3, 3
CONFIG = ReformerConfig(
    num_heads=N, head_dim=H, num_buckets=4, num_hashes=ROUNDS, window=WINDOW, seed=5
)
DOCUMENTS = array([[1] * 40 + [2] * 30 + [0], [0] + [3] * 3 + [7] * 67])
CONSTANTS = Reformer.constants(CONFIG, 1, D)


def bucket_of_tokens(q: Array, rotation: Array) -> Array:  # [T, H], [H, buckets / 2] -> [T]
    rotated = q @ rotation
    return np.asarray(np.argmax(np.concatenate([rotated, -rotated], axis=-1), axis=-1))


def visible_per_round(
    q: Array, documents: Array, causal: bool
) -> Array:  # [B, T, N, H] -> [R, B, N, T, T]
    """Return the keys that each query sees in each round of hashing."""
    groups = np.zeros((ROUNDS, B, N, T), int)
    for r, b, n in np.ndindex(ROUNDS, B, N):
        bucket = bucket_of_tokens(q[b, :, n], CONSTANTS["rotations"][r, n])
        groups[r, b, n] = np.where(documents[b] == 0, -1, 4 * documents[b] + bucket)
    return visible_in_groups(groups, WINDOW, causal)


def expected_attention(q: Any, v: Any, seen: Any) -> Any:
    """Compute equations 3 to 6: the softmax of each round, weighted by its share of the total."""
    k = q / jnp.sqrt(jnp.mean(q**2, axis=-1, keepdims=True) + 1e-6)
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(H)
    scores = scores - np.log(np.maximum(seen.sum(0), 1))
    others = seen & ~np.eye(T, dtype=bool)
    only_self = seen.any(-1) & ~others.any(-1)  # in this round
    raised = jnp.exp(scores)[None] * others
    # A token sees itself if no round shows anything else: 1e-12 vanishes beside all others.
    raised = raised + 1e-12 * (np.eye(T) * only_self[..., None])
    total = raised.sum(-1)
    actual = jnp.einsum("RBNTS,BSNH->RBTNH", raised / jnp.where(total > 0, total, 1)[..., None], v)
    shares = total / jnp.where(total.sum(0) > 0, total.sum(0), 1)[None]
    return jnp.einsum("RBTNH,RBNT->BTNH", actual, shares)


def expected_output(params: Any, x: Any, documents: Any, causal: bool) -> Any:
    """Return the mixer's output by dense attention."""

    def project(p: Any, name: str) -> Any:
        return jnp.einsum("BTD,DNH->BTNH", x, p[name]) + p[f"{name}_bias"][None, None]

    visible = visible_per_round(np.asarray(project(params, "query")), documents, causal)

    def run(params: Any) -> Any:
        y = expected_attention(project(params, "query"), project(params, "value"), visible)
        return jnp.einsum("BTNH,NHD->BTD", y, params["output"]) + params["output_bias"][None, None]

    return run


@pytest.mark.sampled("True")
@pytest.mark.parametrize("causal", [True, False])
def test_matches_rounds_of_dense_attention(causal: bool) -> None:
    mixer, params = make_mixer(CONFIG, D, constants=CONSTANTS)
    x = normal(1, B, T, D)
    kwargs: Any = dict(
        mask=Mask(MaskPattern(causal=causal), segments=DOCUMENTS), constants=CONSTANTS
    )

    actual = value_and_gradients(lambda p: apply_mixer(mixer, p, x, **kwargs).y, params)
    expected = value_and_gradients(expected_output(params, x, DOCUMENTS, causal), params)
    assert_trees_close(actual, expected)


def test_token_sees_itself_only_if_nothing_else_is_visible() -> None:
    mixer, params = make_mixer(CONFIG, D, constants=CONSTANTS)
    x = normal(1, B, T, D)
    mask = Mask(MaskPattern(causal=True))
    inputs = MixerInputs(array([np.arange(T)]), mask, constants=CONSTANTS)
    _, visible = project_and_select(mixer, params, x, inputs)
    itself = np.diagonal(visible, axis1=-2, axis2=-1)
    others = (visible & ~np.eye(T, dtype=bool)).any(-1)
    assert itself[:, :, 0].all()
    assert np.array_equal(itself, ~others)
    assert others.mean() > 0.5


def test_rotations_depend_on_seed_and_layer() -> None:
    make = lambda seed, layer: Reformer.constants(  # noqa: E731
        ReformerConfig(num_heads=N, head_dim=H, seed=seed), layer, D
    )["rotations"]
    assert make(0, 0).shape == (4, N, H, 16)
    assert np.array_equal(make(3, 2), make(3, 2))
    assert not np.array_equal(make(3, 2), make(3, 1))
    assert not np.array_equal(make(3, 2), make(2, 2))


def test_flops() -> None:
    """The rotation onto half of the four buckets, and the keys within a window of 3: 139 / 71 on
    each side.
    """
    flops_per_key, keys_per_side = 2 * N * H, 139 / 71
    full, causal = (
        round(2 * flops_per_key * seen) for seen in (2 * keys_per_side + 1, keys_per_side + 1)
    )
    expected = ROUNDS * (2 * flops_per_key + full), ROUNDS * (2 * flops_per_key + causal)
    assert Reformer.score_flops(CONFIG, D, T) == expected


def test_weights_and_no_cache() -> None:
    names = axes(CONFIG, D, constants=CONSTANTS)
    assert "key" not in names
    assert names["output"] == ("heads", "head", "embed")
    mixer, _ = make_mixer(CONFIG, D, constants=CONSTANTS)
    with pytest.raises(ValueError, match=r"^mixer reformer: has no cache; decode with"):
        mixer.init_cache(B, T)
