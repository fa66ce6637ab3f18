"""Masks given to cuDNN, with XLA's implementation of the same interface in place of the kernel.

`tests_device` compares the kernel itself with the formula.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import array, assert_trees_close, normal
from transformer import Mask, MaskPattern
from transformer.attention.backends.cudnn import attend_cudnn
from transformer.attention.reference import ScoreSpec, attend_reference

B, T, N, K, H = 2, 12, 4, 2, 8
CAUSAL = MaskPattern(causal=True)
# The second row ends in padding, whose queries see nothing.
SEGMENTS: Any = np.array([[1] * 5 + [2] * 7, [1] * 3 + [2] * 6 + [0] * 3], np.int32)
IN_SEGMENT: Any = np.array([[*range(5), *range(7)], [*range(3), *range(6), 0, 0, 0]], np.int32)
ORDER: Any = np.random.default_rng(0).permutation(T)[None].astype(np.int32)

MASKS = {
    "none": (Mask(), False),
    "causal": (Mask(CAUSAL), False),
    "window": (Mask(MaskPattern(causal=True, window=3)), False),
    "window in both directions": (Mask(MaskPattern(window=3)), True),
    "dilated window": (Mask(MaskPattern(causal=True, window=3, dilation=2)), True),
    "documents": (Mask(CAUSAL, positions=IN_SEGMENT, segments=SEGMENTS), True),
    "window in documents": (
        Mask(MaskPattern(causal=True, window=3), positions=IN_SEGMENT, segments=SEGMENTS),
        True,
    ),
    "padding": (Mask(segments=SEGMENTS), True),
    "key lengths": (Mask(key_lengths=array([12, 5])), True),
    "prefix": (
        Mask(MaskPattern(causal=True, prefix=True), prefix_lengths=array([4, 0])),
        True,
    ),
    "global tokens": (
        Mask(MaskPattern(causal=True, window=3), global_positions=array([[1], [-1]])),
        True,
    ),
    "out of order": (Mask(MaskPattern(causal=True, ordered=False), positions=ORDER), True),
}
"""Masks, and whether cuDNN needs an array for them."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the kernel; return the arguments of its calls."""
    calls = []
    original = jax.nn.dot_product_attention

    @functools.wraps(original)
    def attention(*arrays: Any, implementation: str, **kwargs: Any) -> Any:
        assert implementation == "cudnn"
        calls.append(kwargs)
        return original(*arrays, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    return calls


@pytest.mark.parametrize("name", MASKS)
def test_equals_reference(name: str, recorded: list[dict[str, Any]]) -> None:
    mask, needs_array = MASKS[name]
    q, k, v = normal(0, B, T, N, H), normal(1, B, T, K, H), normal(2, B, T, K, H)
    spec = ScoreSpec(H**-0.5)

    @jax.jit
    def both(q: Any, k: Any, v: Any, dy: Any) -> Any:
        def values_and_gradients(attend: Any) -> Any:
            y, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, mask, spec), q, k, v)
            return y, vjp(dy)

        return (
            values_and_gradients(attend_cudnn),
            values_and_gradients(lambda *given: attend_reference(*given)[0]),
        )

    actual, expected = both(q, k, v, normal(3, B, T, N, H))
    assert_trees_close(actual, expected)
    assert [call["mask"] is not None for call in recorded] == [needs_array]
    # Causal masks and windows are named as well, so that the kernel skips blocks.
    native = name in ("causal", "window", "documents", "window in documents")
    assert recorded[0]["is_causal"] is native
    assert (recorded[0]["local_window_size"] is not None) is (native and "window" in name)


def test_cross_attention(recorded: list[dict[str, Any]]) -> None:
    q, k, v = normal(0, B, T, N, H), normal(1, B, 8, K, H), normal(2, B, 8, K, H)
    mask = Mask(segments=SEGMENTS, key_segments=SEGMENTS[:, :8])
    spec = ScoreSpec(0.5)

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        expected, _ = attend_reference(q, k, v, mask, spec)
        return attend_cudnn(q, k, v, mask, spec), expected

    assert_trees_close(*both(q, k, v))
    assert recorded[0]["mask"].shape == (B, 1, T, 8)
