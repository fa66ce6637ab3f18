"""`bench.softmax_race` compares equal results, with equal settings on both sides."""

import sys
from pathlib import Path

import numpy as np
import pytest

from bench.peers.ours_attention import build
from bench.softmax_race import Options, contenders


def test_all_sides_have_the_same_settings() -> None:
    options = Options(
        torch_python=Path(sys.executable),
        backends=("blockwise", "reference"),
        num_heads=2,
        head_dim=8,
        batch=4,
        window=100,
        segments=3,
    )
    tiles, scores, peer = contenders(options, 2048)
    assert peer.settings["batch"] == 2  # as many tokens as 4 rows of the first length, 1,024
    assert (tiles.settings["backend"], scores.settings["backend"]) == ("blockwise", "reference")
    shared = {name: tiles.settings[name] for name in peer.settings}
    assert shared == peer.settings == {name: scores.settings[name] for name in peer.settings}
    assert peer.command[-1] == "bench.peers.torch_attention"


@pytest.mark.parametrize(("window", "segments"), [(0, 0), (4, 0), (0, 2)])
def test_step_computes_gradients_of_softmax_attention(window: int, segments: int) -> None:
    """The sum of their means, from the formula."""
    length, width = 13, 3
    settings = dict(
        batch=1,
        length=length,
        num_heads=1,
        head_dim=width,
        window=window,
        segments=segments,
        precision="float32",
        backend="blockwise",
    )
    drawn = np.random.default_rng(0).normal(size=(4, length, width))
    q, k, v, cotangent = drawn.astype(np.float32).astype(np.float64)
    token = np.arange(length)
    visible = token[:, None] >= token
    if window:
        visible &= token[:, None] - token < window
    if segments:
        visible &= (token * segments // length)[:, None] == token * segments // length
    scores = np.where(visible, q @ k.T / np.sqrt(width), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = cotangent @ v.T
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    gradients = (d_scores @ k, d_scores.T @ q)
    expected = sum(np.abs(each).mean() / np.sqrt(width) for each in gradients)
    expected += np.abs(weights.T @ cotangent).mean()
    actual = build(settings).run(1)
    assert actual is not None
    assert abs(actual - expected) < 1e-5
