"""Convolutions against loops over tokens and taps, with all sizes different."""

from typing import Any

import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import Mask, MaskPattern
from transformer.attention.sparse_ops.local_window import NeighborCache
from transformer.baselines.convolution import ConvolutionConfig
from transformer.testing.contract import check_mixer

B, T, D = 2, 7, 5
SEGMENTS = array([[1, 1, 1, 2, 2, 0, 0], [0, 4, 4, 4, 4, 4, 4]])
CONFIGS = {
    "full": ConvolutionConfig(kernel_size=3),
    "even": ConvolutionConfig(kernel_size=4),
    "separable": ConvolutionConfig(kernel_size=3, separable=True),
}


def expected_convolution(x: Array, w: dict[str, Array], ahead: int, segments: Array) -> Array:
    """Sum each tap over tokens of the same document; the last tap is `ahead` tokens after the
    output.
    """
    if "kernel" in w:
        kernel, bias = w["kernel"], w["kernel_bias"]
    else:  # one matrix, scaled per channel for each tap
        kernel, bias = np.einsum("KD,DE->KDE", w["depthwise"], w["output"]), w["output_bias"]
    y = np.zeros(x.shape) + bias
    for row, t, tap in np.ndindex(B, T, len(kernel)):
        other = t + ahead - (len(kernel) - 1 - tap)
        if 0 <= other < T and segments[row, t] == segments[row, other] != 0:
            y[row, t] += x[row, other] @ kernel[tap]
    return y


@pytest.mark.parametrize(
    ("name", "causal"), [("full", False), ("even", True), ("even", False), ("separable", True)]
)
def test_convolution_within_documents(name: str, causal: bool) -> None:
    config = CONFIGS[name]
    mixer, params = make_mixer(config, D)
    x = normal(1, B, T, D)
    y = apply_mixer(mixer, params, x, mask=Mask(MaskPattern(causal=causal), segments=SEGMENTS)).y
    ahead = 0 if causal else (config.kernel_size - 1) // 2
    assert_close(y, expected_convolution(x, params, ahead, SEGMENTS))
    y = apply_mixer(mixer, params, x, mask=Mask(MaskPattern(causal=causal))).y
    assert_close(y, expected_convolution(x, params, ahead, np.ones((B, T))))


@pytest.mark.full
def test_contract_with_other_settings() -> None:
    for config in (ConvolutionConfig(kernel_size=1), CONFIGS["separable"]):
        check_mixer(config, d_model=6, length=17, lengths=(1, 17, 23))


def test_cache_follows_positions() -> None:
    """Rows of 3 and 5 tokens, the first padded; then one more token each; then a new document."""
    mixer, params = make_mixer(CONFIGS["even"], D)
    x, causal = normal(1, B, T, D), Mask(MaskPattern(causal=True))
    full = np.asarray(apply_mixer(mixer, params, x, mask=causal).y)
    positions = array([[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]])
    cache: Any = NeighborCache.empty(B, 3, (D,), np.float32)
    kwargs: Any = dict(mask=causal, cache=cache, positions=positions)
    _, cache, _ = apply_mixer(mixer, params, x[:, :5], **kwargs)
    next_one = x[[0, 1], [3, 5]][:, None]
    y, cache, _ = apply_mixer(
        mixer, params, next_one, **kwargs | dict(cache=cache, positions=array([[3], [5]]))
    )
    assert_close(y[:, 0], full[[0, 1], [3, 5]])
    anew = apply_mixer(
        mixer, params, x[:, :1], **kwargs | dict(cache=cache, positions=array([[0], [0]]))
    )
    assert_close(anew.y[:, 0], full[:, 0])


def test_logical_axes() -> None:
    assert axes(CONFIGS["full"], D) == {
        "kernel": ("taps", "embed", "hidden"),
        "kernel_bias": ("hidden",),
    }
    assert axes(CONFIGS["separable"], D) == {
        "depthwise": ("taps", "embed"),
        "output": ("embed", "hidden"),
        "output_bias": ("hidden",),
    }
