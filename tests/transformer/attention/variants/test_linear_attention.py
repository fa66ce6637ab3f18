"""Linear attention: the whole mixer, and decoding as a recurrence."""

from typing import Any

import jax
import numpy as np

from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import applied, made
from transformer import BlockConfig, LanguageModel, LinearAttentionConfig, Mask, TransformerConfig
from transformer.attention.masks import MaskPattern
from transformer.attention.variants.linear_attention import FEATURE_FLOOR, elu_features
from transformer.costs import count_token_flops

B, T, D, N, H = 2, 7, 6, 3, 5
CONFIG = LinearAttentionConfig(num_heads=N, head_dim=H, bias=False)
CAUSAL = Mask(MaskPattern(causal=True))


def phi(x: Array) -> Array:
    return np.where(x > 0, x + 1, np.exp(x))


def recurrent(x: Array, w: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Equations 18 to 20 of the paper, token by token: y, and the sums behind the last."""
    y = np.zeros((B, T, D))
    s, z = np.zeros((B, N, H, H)), np.zeros((B, N, H))
    for b, t, n in np.ndindex(B, T, N):
        q, k, v = (x[b, t] @ w[name][:, n] for name in ("query", "key", "value"))
        s[b, n] += np.outer(phi(k), v)
        z[b, n] += phi(k)
        y[b, t] += phi(q) @ s[b, n] / (phi(q) @ z[b, n]) @ w["output"][n]
    return y, s, z


def test_it_is_the_papers_recurrence_and_keeps_its_state() -> None:
    mixer, w = made(CONFIG, D)
    x = normal(0, B, T, D)
    y, s, z = recurrent(x.astype(np.float64), w)
    given: Any = dict(mask=CAUSAL, cache=mixer.init_cache(B, T))
    found = applied(mixer, w, x, **given)
    assert_close(found.y, y)
    assert_close(found.cache.kv_sums[..., :-1], s)
    assert_close(found.cache.kv_sums[..., -1], z)
    assert_close(applied(mixer, w, x, mask=CAUSAL).y, y)


def test_another_document_starts_anew_where_positions_do() -> None:
    """Two tokens that end one document, then another, from a state of the first document."""
    mixer, w = made(CONFIG, D)
    x, y = normal(0, B, T, D), normal(1, B, T, D)
    cache = applied(mixer, w, x, mask=CAUSAL, cache=mixer.init_cache(B, T)).cache
    both = np.concatenate([x[:, :2], y], axis=1)
    positions = np.concatenate([[T, T + 1], np.arange(T)])[None]
    found = applied(mixer, w, both, mask=CAUSAL, cache=cache, positions=positions)
    alone = applied(mixer, w, y, mask=CAUSAL, cache=mixer.init_cache(B, T))
    assert_close(found.y[:, 2:], alone.y)
    assert_close(found.cache.kv_sums, alone.cache.kv_sums)


def test_features() -> None:
    x = array([-200.0, -3.0, 0.0, 0.5, 300.0])
    assert_close(elu_features(x).values, [FEATURE_FLOOR, np.exp(-3), 1, 1.5, 301])


def test_the_slope_of_features_has_no_step_at_zero() -> None:
    """1 from there on, exp(x) below: on both sides of zero, and at it, 1. Far off it is a number,
    and relative digits are kept where exp(x) - 1 + 1 would have none."""
    x = np.array([-200.0, -30.0, -3.0, -1e-6, -0.0, 0.0, 1e-6, 0.5, 300.0], np.float32)
    y, pull = jax.vjp(lambda x: elu_features(x).values, x)
    (slope,) = pull(np.ones_like(x))
    exact = np.where(x > 0, 1, np.exp(np.minimum(x, 0)))
    assert_close(slope, np.where(exact < FEATURE_FLOOR, 0, exact))
    np.testing.assert_allclose(y[1], np.exp(x[1]), rtol=1e-5)


def test_costs() -> None:
    block = BlockConfig(mixer=CONFIG, feed_forward=None)
    config = TransformerConfig(vocab_size=17, d_model=D, num_layers=1, layer_pattern=(block,))
    flops = count_token_flops(LanguageModel(config), 1000)
    assert flops.scores == flops.scores_causal == 2 * 2 * N * H * (H + 1)
