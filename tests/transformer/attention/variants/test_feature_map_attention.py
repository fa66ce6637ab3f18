"""Feature-map attention: running sums equal explicit weights for every pair, with and without
chunks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.feature_maps import FORMULAS, dense_attention
from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import apply_mixer, make_mixer
from transformer import LinearAttentionConfig, Mask, MaskPattern, PerformerConfig
from transformer.attention.document_boundaries import document_boundaries
from transformer.attention.masks import dense_mask
from transformer.attention.mixer import MixerConfig
from transformer.attention.variants import chunks, feature_map_attention
from transformer.attention.variants.feature_map_attention import (
    FeatureMap,
    attend_bidirectional,
    attend_causal,
)
from transformer.attention.variants.linear_attention import elu_features
from transformer.attention.variants.performer import draw_random_vectors, make_feature_map

B, T, S, N, K, H, VALUES, M = 2, 29, 19, 6, 3, 5, 7, 13
RANDOM_VECTORS: Any = draw_random_vectors(M, H, orthogonal=True, seed=(3,))
SEGMENTS = array([np.repeat([1, 2, 3, 0], [3, 9, 13, 4]), np.repeat([7, 0, 5], [17, 2, 10])])
KEY_SEGMENTS = array([np.repeat([3, 0, 1, 2], [6, 2, 7, 4]), np.repeat([5, 7, 0], [8, 9, 2])])
LENGTHS = array([23, 0])


def feature_map(kind: Any) -> FeatureMap:
    return elu_features if kind == "elu" else make_feature_map(kind, RANDOM_VECTORS)


def inputs(keys: int = T, scale: float = 1.0) -> tuple[Any, Any, Any]:
    q, k = normal(0, B, T, N, H) * scale, normal(1, B, keys, K, H) * scale
    return np.float32(q), np.float32(k), normal(2, B, keys, K, VALUES)


def attend_in_chunks(kind: str, mask: Mask, q: Any, k: Any, v: Any) -> jax.Array:
    boundaries = document_boundaries(mask, jnp.arange(T)[None])
    return attend_causal(q, k, v, feature_map(kind), boundaries)[0]


def attend_all(kind: str, mask: Mask, q: Any, k: Any, v: Any) -> jax.Array:
    return attend_bidirectional(q, k, v, feature_map(kind), mask)


def attend_by_pairs(kind: str, visible: Array, q: Any, k: Any, v: Any, xp: Any = np) -> Any:
    phi = functools.partial(FORMULAS[kind], random_vectors=RANDOM_VECTORS, xp=xp)
    return dense_attention(phi(q), phi(k), v, visible, xp)


CAUSAL = MaskPattern(causal=True)
CASES = [
    ("positive", Mask(CAUSAL, segments=SEGMENTS)),
    ("trigonometric", Mask(CAUSAL, segments=SEGMENTS)),
    ("relu", Mask(CAUSAL, key_lengths=LENGTHS)),
    ("elu", Mask(CAUSAL, segments=SEGMENTS)),
    ("positive", Mask()),
    ("positive", Mask(segments=SEGMENTS)),
    ("trigonometric", Mask(key_lengths=LENGTHS)),
    ("positive", Mask(segments=SEGMENTS, key_segments=KEY_SEGMENTS)),
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "mask"), CASES, ids=range(len(CASES)))
def test_sums_match_explicit_weights(
    kind: str, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 8)
    # Smaller vectors keep sums of trigonometric weights away from zero, where digits are lost.
    scale = 0.3 if kind == "trigonometric" else 1.0
    q, k, v = inputs(T if mask.key_segments is None else S, scale)
    visible = np.broadcast_to(dense_mask(mask, T, k.shape[1]), (B, T, k.shape[1]))
    expected = attend_by_pairs(kind, visible, *(np.float64(each) for each in (q, k, v)))
    is_token = np.ones((B, T)) if mask.segments is None else mask.segments != 0
    if mask.pattern.causal:
        attend: Any = attend_in_chunks  # padding rows are left to the caller
    else:
        attend, is_token = attend_all, np.ones((B, T))
    cotangent = normal(5, B, T, N, VALUES) * is_token.astype(np.float32)[:, :, None, None]

    def values_and_gradients(attend: Any, *arrays: Any) -> Any:
        y, vjp_fn = jax.vjp(attend, *arrays)
        return y, vjp_fn(cotangent)

    y, gradients = jax.jit(
        functools.partial(values_and_gradients, functools.partial(attend, kind, mask))
    )(q, k, v)
    dense = functools.partial(attend_by_pairs, kind, visible, xp=jnp)
    expected_gradients = jax.jit(functools.partial(values_and_gradients, dense))(q, k, v)[1]
    assert_close(y * is_token[:, :, None, None], expected * is_token[:, :, None, None])
    for actual, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, expected_gradient)


@pytest.mark.parametrize("kind", ["positive", "elu"])
def test_large_inputs_give_averages_of_visible_values(kind: str) -> None:
    """With inputs a hundred times larger, outputs stay within the values and gradients are
    finite.
    """
    q, k, v = inputs(scale=100.0)

    def total(*given: Any) -> Any:
        y = attend_in_chunks(kind, Mask(CAUSAL), *given)
        return jnp.square(y).sum(), y

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
    (_, y), gradients = run(q, k, v)
    lowest, highest = (
        f(v, axis=1).repeat(2, axis=2) for f in (np.minimum.accumulate, np.maximum.accumulate)
    )
    assert (y >= lowest - 1e-5).all()
    assert (y <= highest + 1e-5).all()
    assert_close(y[:, 0], v[:, 0].repeat(2, axis=1))
    assert all(np.isfinite(each).all() for each in gradients)


def test_normalization_near_zero_is_finite() -> None:
    sums_and_totals = jnp.array([[3.0, 1e-9], [3.0, -1e-9], [3.0, -2.0], [0.0, 0.0]])
    y = feature_map_attention._normalize(sums_and_totals, signed=True)
    assert_close(y[:, 0], [3e6, -3e6, -1.5, 0.0])


@pytest.mark.parametrize(
    "config", [PerformerConfig(num_heads=2), LinearAttentionConfig(num_heads=2)]
)
def test_cache_size_does_not_depend_on_length(config: MixerConfig) -> None:
    mixer, _ = make_mixer(config, 6)
    for init_cache in (mixer.init_cache, mixer.init_memory_cache):
        short, long = (
            jax.eval_shape(functools.partial(init_cache, 3, size)) for size in (1, 10**6)
        )
        assert short == long


def test_a_memory_is_read_as_a_whole() -> None:
    mixer, params = make_mixer(LinearAttentionConfig(num_heads=2), 6)
    x = normal(0, 1, 3, 6)
    with pytest.raises(ValueError, match="attends to the whole memory"):
        apply_mixer(mixer, params, x, memory=x, mask=Mask(CAUSAL))
    with pytest.raises(ValueError, match="attends to the whole memory"):
        apply_mixer(mixer, params, x, memory=x, cache=mixer.init_cache(1, 3))
