"""Sums over keys equal all weights one by one, in chunks and not."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.kernels import FORMULAS, dense_attention
from tests.transformer.mixers import applied, made
from transformer import LinearAttentionConfig, Mask, MaskPattern, PerformerConfig
from transformer.attention.attention_config import MixerConfig
from transformer.attention.documents import document_boundaries
from transformer.attention.masks import dense_mask
from transformer.attention.variants import prefix_sums as sums
from transformer.attention.variants.feature_map_attention import attend_bidirectional
from transformer.attention.variants.linear_attention import elu_features
from transformer.attention.variants.performer import draw_random_vectors, make_feature_map

B, T, S, N, K, H, VALUES, M = 2, 29, 19, 6, 3, 5, 7, 13
DIRECTIONS = draw_random_vectors(M, H, orthogonal=True, seed=(3,))
SEGMENTS = array([np.repeat([1, 2, 3, 0], [3, 9, 13, 4]), np.repeat([7, 0, 5], [17, 2, 10])])
OTHERS = array([np.repeat([3, 0, 1, 2], [6, 2, 7, 4]), np.repeat([5, 7, 0], [8, 9, 2])])
LENGTHS = array([23, 0])


def feature_map(kind: Any) -> sums.FeatureMap:
    return elu_features if kind == "elu" else make_feature_map(kind, DIRECTIONS)


def inputs(keys: int = T, scale: float = 1.0) -> tuple[Any, Any, Any]:
    q, k = normal(0, B, T, N, H) * scale, normal(1, B, keys, K, H) * scale
    return np.float32(q), np.float32(k), normal(2, B, keys, K, VALUES)


def in_chunks(kind: str, mask: Mask, q: Any, k: Any, v: Any) -> jax.Array:
    line = document_boundaries(mask, jnp.arange(T)[None])
    return sums.attend_causal(q, k, v, feature_map(kind), line)[0]


def at_once(kind: str, mask: Mask, q: Any, k: Any, v: Any) -> jax.Array:
    return attend_bidirectional(q, k, v, feature_map(kind), mask)


def by_pairs(kind: str, seen: Array, q: Any, k: Any, v: Any, xp: Any = np) -> Any:
    phi = functools.partial(FORMULAS[kind], directions=DIRECTIONS, xp=xp)
    return dense_attention(phi(q), phi(k), v, seen, xp)


CAUSAL = MaskPattern(causal=True)
CASES = [
    ("positive", Mask(CAUSAL, segments=SEGMENTS)),
    ("positive", Mask(CAUSAL)),
    ("trigonometric", Mask(CAUSAL, segments=SEGMENTS)),
    ("relu", Mask(CAUSAL, key_lengths=LENGTHS)),
    ("elu", Mask(CAUSAL, segments=SEGMENTS)),
    ("positive", Mask()),
    ("positive", Mask(segments=SEGMENTS)),
    ("trigonometric", Mask(key_lengths=LENGTHS)),
    ("elu", Mask(segments=array(SEGMENTS != 0) * 4)),
    ("positive", Mask(segments=SEGMENTS, key_segments=OTHERS)),
]


@pytest.mark.slow
@pytest.mark.sampled("0", "3", "5", "7")
@pytest.mark.parametrize(("kind", "mask"), CASES, ids=range(len(CASES)))
def test_sums_equal_all_pairs(kind: str, mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "CHUNK_SIZE", 8)
    # With smaller vectors, trigonometric weights have no sums near zero: no digits are lost there.
    scale = 0.3 if kind == "trigonometric" else 1.0
    q, k, v = inputs(T if mask.key_segments is None else S, scale)
    seen = np.broadcast_to(dense_mask(mask, T, k.shape[1]), (B, T, k.shape[1]))
    expected = by_pairs(kind, seen, *(np.float64(each) for each in (q, k, v)))
    real = np.ones((B, T)) if mask.segments is None else mask.segments != 0
    if mask.pattern.causal:
        form: Any = in_chunks  # which leaves the padding to its caller
    else:
        form, real = at_once, np.ones((B, T))
    cotangent = normal(5, B, T, N, VALUES) * real.astype(np.float32)[:, :, None, None]

    def pulled(form: Any, *given: Any) -> Any:
        y, pull = jax.vjp(form, *given)
        return y, pull(cotangent)

    y, gradients = jax.jit(functools.partial(pulled, functools.partial(form, kind, mask)))(q, k, v)
    pairs = functools.partial(by_pairs, kind, seen, xp=jnp)
    theirs = jax.jit(functools.partial(pulled, pairs))(q, k, v)[1]
    assert_close(y * real[:, :, None, None], expected * real[:, :, None, None])
    for got, wanted in zip(gradients, theirs, strict=True):
        assert_close(got, wanted)


@pytest.mark.parametrize("kind", ["positive", "elu"])
def test_large_inputs_give_averages_of_what_is_seen(kind: str) -> None:
    """A hundred times the usual: weights are positive, none is lost, so that results stay within
    the values, and gradients are numbers."""
    q, k, v = inputs(scale=100.0)

    def total(*given: Any) -> Any:
        y = in_chunks(kind, Mask(CAUSAL), *given)
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


def test_what_trigonometric_weights_leave_near_zero_stays_a_number() -> None:
    found = jnp.array([[3.0, 1e-9], [3.0, -1e-9], [3.0, -2.0], [0.0, 0.0]])
    y = sums._normalize(found, signed=True)
    assert_close(y[:, 0], [3e6, -3e6, -1.5, 0.0])


@pytest.mark.parametrize(
    "config", [PerformerConfig(num_heads=2), LinearAttentionConfig(num_heads=2)]
)
def test_what_is_kept_does_not_grow(config: MixerConfig) -> None:
    mixer, _ = made(config, 6)
    for make in (mixer.init_cache, mixer.init_memory_cache):
        short, long = (jax.eval_shape(functools.partial(make, 3, size)) for size in (1, 10**6))
        assert short == long


def test_errors() -> None:
    mixer, params = made(LinearAttentionConfig(num_heads=2), 6)
    x = normal(0, 1, 3, 6)
    whole = r"^mixer linear: attends to the whole memory; give a mask that is not causal"
    with pytest.raises(ValueError, match=whole):
        applied(mixer, params, x, memory=x, mask=Mask(CAUSAL))
    with pytest.raises(ValueError, match=whole):
        applied(mixer, params, x, memory=x, cache=mixer.init_cache(1, 3))
    with pytest.raises(
        ValueError, match=r"^mixer linear: decoding with a cache needs a causal mask"
    ):
        applied(mixer, params, x, cache=mixer.init_cache(1, 3))
    with pytest.raises(ValueError, match=r"^mixer linear: does not support a window"):
        applied(mixer, params, x, mask=Mask(MaskPattern(causal=True, window=2)))
