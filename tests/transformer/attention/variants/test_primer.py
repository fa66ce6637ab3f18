"""Primer's attention against loops, with all sizes different."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import LanguageModel, Mask, MaskPattern, RoPE, TransformerConfig
from transformer.attention.mixer import MixerInputs
from transformer.attention.rope import apply_rope
from transformer.attention.variants.primer import PrimerConfig
from transformer.flops import count_token_flops
from transformer.models.block import BlockConfig

rotate = jax.jit(apply_rope, static_argnums=2)

B, T, D, N, H = 2, 7, 6, 3, 4
CONFIG = PrimerConfig(num_heads=N, head_dim=H)
SEGMENTS = array([[1, 1, 1, 2, 2, 2, 0], [0, 4, 4, 4, 4, 4, 4]])
WEIGHTS = frozenset({"weights"})


def expected_convolution(x: Array, taps: Array, behind: int, segments: Array) -> Array:
    """Convolve [B, T, N, H] with taps [3, N, H]; the first tap is `behind` tokens back."""
    y = np.zeros(x.shape)
    for row, t, tap in np.ndindex(B, T, 3):
        other = t + tap - behind
        if 0 <= other < T and segments[row, t] == segments[row, other] != 0:
            y[row, t] += x[row, other] * taps[tap]
    return y


def expected_attention(q: Array, k: Array, v: Array, seen: Array) -> tuple[Array, Array]:
    """Return the output [B, T, N, H] and the weights [B, N, T, T] from q, k, v [B, T, N, H]."""
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(H)
    exp_scores = np.where(seen[:, None], np.exp(scores), 0)
    weights = exp_scores / np.maximum(exp_scores.sum(-1, keepdims=True), 1e-30)
    return np.einsum("BNTS,BSNH->BTNH", weights, v), weights


@pytest.mark.parametrize("causal", [True, False])
def test_projections_are_convolved_within_documents(causal: bool) -> None:
    mixer, params = make_mixer(CONFIG, D)
    x = normal(1, B, T, D)
    mask = Mask(MaskPattern(causal=causal), segments=SEGMENTS)
    output = apply_mixer(mixer, params, x, WEIGHTS, mask=mask)
    q, k, v = (
        expected_convolution(
            np.einsum("BTD,DNH->BTNH", x, params[name]),
            params[f"{name}_taps"],
            2 if causal else 1,
            SEGMENTS,
        )
        for name in ("query", "key", "value")
    )
    visible = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (SEGMENTS[:, None, :] != 0)
    y, weights = expected_attention(q, k, v, visible & (np.tri(T, dtype=bool) | (not causal)))
    assert_close(output.aux["weights"], weights)
    assert_close(output.y, np.einsum("BTNH,NHD->BTD", y, params["output"]))


def test_rope_is_applied_after_convolution() -> None:
    rotary = RoPE(theta=50.0)
    mixer, params = make_mixer(PrimerConfig(num_heads=N, head_dim=H, position=rotary), D)
    x = normal(1, B, T, D)
    output = apply_mixer(mixer, params, x, WEIGHTS, mask=Mask(MaskPattern(causal=True)))
    full: Any = np.ones((B, T))

    def rotated(name: str) -> Array:
        make_mixer: Any = np.einsum("BTD,DNH->BTNH", x, params[name])
        heads: Any = np.float32(expected_convolution(make_mixer, params[f"{name}_taps"], 2, full))
        return np.asarray(rotate(heads, array([np.arange(T)]), rotary))

    visible = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    q, k = rotated("query"), rotated("key")
    assert_close(output.aux["weights"], expected_attention(q, k, k, visible)[1])


def test_initial_convolution_weights() -> None:
    mixer, _ = make_mixer(CONFIG, D)
    kwargs: Any = dict(positions=np.zeros((1, 1), int))
    x = normal(0, 1, 1, D)
    for causal, taps in ((True, [1 / 6, 1 / 6, 1 / 2]), (False, [1 / 6, 1 / 2, 1 / 6])):
        mask = Mask(MaskPattern(causal=causal))
        init = lambda key, mask=mask: mixer.init(key, x, MixerInputs(mask=mask, **kwargs))  # noqa: E731
        params = jax.jit(init)(jax.random.key(0))["params"]
        for name in ("query", "key", "value"):
            assert_close(params[f"{name}_taps"][:, 1, 2], taps)


def test_axes_and_flops() -> None:
    names = axes(CONFIG, D)
    assert names["key_taps"] == ("taps", "heads", "head")
    assert names["output"] == ("heads", "head", "embed")
    block = BlockConfig(mixer=CONFIG, feed_forward=None)
    model = LanguageModel(
        TransformerConfig(vocab_size=17, d_model=D, num_layers=1, layer_pattern=(block,))
    )
    flops = count_token_flops(model, T)
    assert (flops.projections, flops.scores) == (2 * 4 * D * N * H, 2 * N * 2 * H * T)
    assert flops.scores_causal == N * 2 * H * (T + 1)
