"""Primer's attention against loops, at sizes of which no two are alike."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal, softmax
from tests.transformer.mixers import applied, axes, made
from transformer import LanguageModel, Mask, MaskPattern, RoPE, TransformerConfig
from transformer.attention.mixer import MixerInputs
from transformer.attention.rope import apply_rope
from transformer.attention.variants.linear_configs import PrimerConfig
from transformer.config import BlockConfig
from transformer.costs import count_token_flops

B, T, D, N, H = 2, 7, 6, 3, 4
CONFIG = PrimerConfig(num_heads=N, head_dim=H)
SEGMENTS = array([[1, 1, 1, 2, 2, 2, 0], [0, 4, 4, 4, 4, 4, 4]])
WEIGHTS = frozenset({"weights"})


def convolved(x: Array, taps: Array, behind: int, segments: Array) -> Array:
    """[B, T, N, H], [3, N, H]; the first tap is `behind` tokens back."""
    y = np.zeros(x.shape)
    for row, t, tap in np.ndindex(B, T, 3):
        other = t + tap - behind
        if 0 <= other < T and segments[row, t] == segments[row, other] != 0:
            y[row, t] += x[row, other] * taps[tap]
    return y


def attended(q: Array, k: Array, v: Array, seen: Array) -> tuple[Array, Array]:
    """[B, T, N, H] each, [B, T, T] -> the same, and weights [B, N, T, T]."""
    y, weights = np.zeros(v.shape), np.zeros((B, N, T, T))
    for row, n, t in np.ndindex(B, N, T):
        shown = np.flatnonzero(seen[row, t])
        if len(shown):
            scores = k[row, shown, n] @ q[row, t, n] / math.sqrt(H)
            weights[row, n, t, shown] = softmax(scores)
        y[row, t, n] = weights[row, n, t] @ v[row, :, n]
    return y, weights


@pytest.mark.parametrize("causal", [True, False])
def test_each_projection_is_convolved_within_its_document(causal: bool) -> None:
    mixer, params = made(CONFIG, D)
    x = normal(1, B, T, D)
    mask = Mask(MaskPattern(causal=causal), segments=SEGMENTS)
    output = applied(mixer, params, x, WEIGHTS, mask=mask)
    q, k, v = (
        convolved(
            np.einsum("BTD,DNH->BTNH", x, params[name]),
            params[f"{name}_taps"],
            2 if causal else 1,
            SEGMENTS,
        )
        for name in ("query", "key", "value")
    )
    seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (SEGMENTS[:, None, :] != 0)
    y, weights = attended(q, k, v, seen & (np.tri(T, dtype=bool) | (not causal)))
    assert_close(output.aux["weights"], weights)
    assert_close(output.y, np.einsum("BTNH,NHD->BTD", y, params["output"]))


def test_what_is_convolved_is_turned_by_its_position() -> None:
    rotary = RoPE(theta=50.0)
    mixer, params = made(PrimerConfig(num_heads=N, head_dim=H, position=rotary), D)
    x = normal(1, B, T, D)
    output = applied(mixer, params, x, WEIGHTS, mask=Mask(MaskPattern(causal=True)))
    whole: Any = np.ones((B, T))

    def turned(name: str) -> Array:
        made: Any = np.einsum("BTD,DNH->BTNH", x, params[name])
        heads: Any = np.float32(convolved(made, params[f"{name}_taps"], 2, whole))
        return np.asarray(apply_rope(heads, array([np.arange(T)]), rotary))

    seen = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))
    q, k = turned("query"), turned("key")
    assert_close(output.aux["weights"], attended(q, k, k, seen)[1])


def test_it_starts_as_half_of_each_token_and_a_sixth_of_its_neighbours() -> None:
    mixer, _ = made(CONFIG, D)
    given: Any = dict(positions=np.zeros((1, 1), int))
    x = normal(0, 1, 1, D)
    for causal, taps in ((True, [1 / 6, 1 / 6, 1 / 2]), (False, [1 / 6, 1 / 2, 1 / 6])):
        mask = Mask(MaskPattern(causal=causal))
        init = lambda key, mask=mask: mixer.init(key, x, MixerInputs(mask=mask, **given))  # noqa: E731
        params = jax.jit(init)(jax.random.key(0))["params"]
        for name in ("query", "key", "value"):
            assert_close(params[f"{name}_taps"].value[:, 1, 2], taps)


def test_axes_and_costs() -> None:
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


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"^primer.num_heads 4: does not divide the width 6; give a di"
    ):
        PrimerConfig(num_heads=4).check_d_model(D)
    with pytest.raises(ValueError, match=r"^primer.num_heads 0: give 1 or more$"):
        PrimerConfig(num_heads=0)
    mixer, params = made(CONFIG, D)
    with pytest.raises(
        ValueError, match=r"^mixer primer: decoding with a cache needs a causal mask"
    ):
        applied(mixer, params, normal(0, B, T, D), cache=mixer.init_cache(B, T))
