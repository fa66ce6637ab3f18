"""Linear attention: the whole mixer, and decoding as a recurrence."""

from typing import Any

import jax
import numpy as np

from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import apply_mixer, make_mixer
from transformer import LinearAttentionConfig, Mask
from transformer.attention.masks import MaskPattern
from transformer.attention.variants.linear_attention import (
    FEATURE_FLOOR,
    LinearAttention,
    elu_features,
)

B, T, D, N, H = 2, 7, 6, 3, 5
CONFIG = LinearAttentionConfig(num_heads=N, head_dim=H, bias=False)
CAUSAL = Mask(MaskPattern(causal=True))


def phi(x: Array) -> Array:
    return np.where(x > 0, x + 1, np.exp(x))


def expected_recurrence(x: Array, w: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Return y, s and z after the last token by equations 18 to 20 of the paper, token by token."""
    y = np.zeros((B, T, D))
    s, z = np.zeros((B, N, H, H)), np.zeros((B, N, H))
    for b, t, n in np.ndindex(B, T, N):
        q, k, v = (x[b, t] @ w[name][:, n] for name in ("query", "key", "value"))
        s[b, n] += np.outer(phi(k), v)
        z[b, n] += phi(k)
        y[b, t] += phi(q) @ s[b, n] / (phi(q) @ z[b, n]) @ w["output"][n]
    return y, s, z


def test_matches_paper_recurrence_and_state() -> None:
    mixer, w = make_mixer(CONFIG, D)
    x = normal(0, B, T, D)
    y, s, z = expected_recurrence(x.astype(np.float64), w)
    kwargs: Any = dict(mask=CAUSAL, cache=mixer.init_cache(B, T))
    result = apply_mixer(mixer, w, x, **kwargs)
    assert_close(result.y, y)
    assert_close(result.cache.kv_sums[..., :-1], s)
    assert_close(result.cache.kv_sums[..., -1], z)
    assert_close(apply_mixer(mixer, w, x, mask=CAUSAL).y, y)


def test_restarted_positions_reset_the_state() -> None:
    """The state holds a first document. Two more of its tokens follow, then another document."""
    mixer, w = make_mixer(CONFIG, D)
    x, y = normal(0, B, T, D), normal(1, B, T, D)
    cache = apply_mixer(mixer, w, x, mask=CAUSAL, cache=mixer.init_cache(B, T)).cache
    both = np.concatenate([x[:, :2], y], axis=1)
    positions = np.concatenate([[T, T + 1], np.arange(T)])[None]
    result = apply_mixer(mixer, w, both, mask=CAUSAL, cache=cache, positions=positions)
    alone = apply_mixer(mixer, w, y, mask=CAUSAL, cache=mixer.init_cache(B, T))
    assert_close(result.y[:, 2:], alone.y)
    assert_close(result.cache.kv_sums, alone.cache.kv_sums)


def test_elu_features() -> None:
    x = array([-200.0, -3.0, 0.0, 0.5, 300.0])
    assert_close(elu_features(x).values, [FEATURE_FLOOR, np.exp(-3), 1, 1.5, 301])


def test_derivative_of_elu_features() -> None:
    """The derivative is continuous at zero, finite far below it, and keeps relative precision.

    Computing exp(x) - 1 + 1 would lose all digits there.
    """
    x = np.array([-200.0, -30.0, -3.0, -1e-6, -0.0, 0.0, 1e-6, 0.5, 300.0], np.float32)

    @jax.jit
    def value_and_derivative(x: Any, dy: Any) -> Any:
        y, vjp_fn = jax.vjp(lambda x: elu_features(x).values, x)
        return y, *vjp_fn(dy)

    y, derivative = jax.device_get(value_and_derivative(x, np.ones_like(x)))
    exact = np.where(x > 0, 1, np.exp(np.minimum(x, 0)))
    assert_close(derivative, np.where(exact < FEATURE_FLOOR, 0, exact))
    np.testing.assert_allclose(y[1], np.exp(x[1]), rtol=1e-5)


def test_flops() -> None:
    assert LinearAttention.score_flops(CONFIG, D, 1000) == (2 * 2 * N * H * (H + 1),) * 2
