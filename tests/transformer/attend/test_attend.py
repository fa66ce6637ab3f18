"""All forms of attention compute what the formula says."""

import logging
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal
from transformer import Hardware, Mask, Pattern
from transformer.attend import attend as attend_eagerly
from transformer.attend.query_blocks import block_count
from transformer.masks import dense
from transformer.testing.select import softmax_attention

B, T, S, N, K, H, VALUES = 2, 5, 7, 6, 3, 11, 13
attend = jax.jit(
    attend_eagerly,
    static_argnames=("form", "hardware", "scale", "softmax_dtype", "rate", "want"),
)


def inputs(queries: int, keys: int, kv_heads: int = K) -> tuple[Any, Any, Any]:
    return (
        normal(0, B, queries, N, H),
        normal(1, B, keys, kv_heads, H),
        normal(2, B, keys, kv_heads, VALUES),
    )


def attended(mask: Mask, queries: int, keys: int, **given: Any) -> Any:
    given = dict(hardware=Hardware(), scale=H**-0.5) | given
    return attend(*inputs(queries, keys), mask, **given)


def documents(length: int) -> Any:  # [B, T]
    """Some documents in each row, and padding at the end of the first."""
    starts = np.array([[0.2, 0.3, 0.9], [0.5, 0.7, 1.0]]) * length
    segments = 1 + (np.arange(length)[None, :, None] >= starts[:, None]).sum(-1)
    return np.where(segments == 4, 0, segments)


@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_the_reference_against_the_formula(scale: float) -> None:
    segments = array([[1, 1, 0, 2, 2], [0] * 5])
    mask = Mask(segments=segments, key_segments=array([[1, 2, 2, 1, 0, 0, 2], [1] * 7]))
    output = attended(mask, T, S, scale=scale, form="reference", want=frozenset({"weights"}))
    q, k, v = inputs(T, S)
    seen = np.asarray(dense(mask, T, S))[:, None]
    # The formula divides by sqrt(H) itself.
    assert_close(output.y, softmax_attention(q * scale * H**0.5, k, v, seen))
    weights = np.asarray(output.aux["weights"])
    assert weights.shape == (B, N, T, S)
    v_of_heads = np.repeat(v, N // K, axis=2)
    assert_close(output.y, np.einsum("BNTS,BSNH->BTNH", weights, v_of_heads))


@pytest.mark.parametrize("form", ["reference", "query_blocks"])
def test_a_query_that_sees_nothing_gets_zeros_and_passes_no_gradient(form: Any) -> None:
    length = 131 if form == "query_blocks" else T
    segments: Any = np.where(np.arange(length) % 3 == 1, 0, 1)[None].repeat(B, 0)
    mask = Mask(Pattern(causal=True), segments=segments)

    def total(arrays: Any, chosen: Any) -> Any:
        return (attend(*arrays, mask, form=form, hardware=Hardware(), scale=1.0).y * chosen).sum()

    empty = (segments == 0)[..., None, None]
    y = attended(mask, length, length, form=form).y
    assert not np.any(np.where(empty, y, 0))
    assert np.any(y)
    gradients = jax.jit(jax.grad(total))(inputs(length, length), empty.astype(np.float32))
    assert not any(np.any(each) for each in gradients)  # neither NaN nor anything else
    gradients = jax.jit(jax.grad(total))(inputs(length, length), np.ones(empty.shape, np.float32))
    assert all(np.isfinite(each).all() and np.any(each) for each in gradients)
    assert not any(np.any(np.where(empty, each, 0)) for each in gradients)


@pytest.mark.parametrize(
    ("length", "blocks"), [(1, 1), (127, 1), (128, 2), (191, 2), (192, 3), (257, 4), (4096, 4)]
)
def test_queries_are_cut_into_a_few_blocks(length: int, blocks: int) -> None:
    assert block_count(length) == blocks


MASKS: dict[str, Any] = {
    "causal": lambda length: Mask(Pattern(causal=True)),
    "segments": lambda length: Mask(Pattern(causal=True), segments=documents(length)),
    "window": lambda length: Mask(Pattern(causal=True, window=37, dilation=3)),
    "lengths and globals": lambda length: Mask(
        Pattern(causal=True, window=5), lengths=array([length, 71]), globals=array([[3, 70]])
    ),
}


@pytest.mark.parametrize(
    ("length", "masks", "kv_heads"),
    [
        (131, "causal", N),
        (131, "segments", K),
        (131, "window", 1),
        (257, "lengths and globals", K),
    ],
)
def test_query_blocks_are_the_reference(length: int, masks: str, kv_heads: int) -> None:
    mask = MASKS[masks](length)
    arrays, pulled = inputs(length, length, kv_heads), normal(3, B, length, N, VALUES)

    def both(form: Any) -> tuple[Array, tuple[Array, ...]]:
        def run(arrays: Any) -> Any:
            return attend(*arrays, mask, form=form, hardware=Hardware(), scale=0.3).y

        def values_and_gradients(arrays: Any) -> Any:
            y, pull = jax.vjp(run, arrays)
            return y, pull(pulled)[0]

        y, gradients = jax.jit(values_and_gradients)(arrays)
        return y, gradients

    (y, gradients), (expected, expected_gradients) = both("query_blocks"), both("reference")
    assert_close(y, expected)
    for got, want in zip(gradients, expected_gradients, strict=True):
        assert_close(got, want)


def test_dropped_weights_keep_their_mean() -> None:
    mask, keys = Mask(), jax.random.split(jax.random.key(0), B)
    arrays = inputs(T, 997)
    alike = np.zeros_like(arrays[0])  # every weight is 1/997
    given: dict[str, Any] = dict(hardware=Hardware(), scale=1.0, rate=0.5)
    ones = np.ones_like(arrays[2])
    y = attend(alike, *arrays[1:2], ones, mask, keys=keys, **given).y
    kept = np.asarray(y)[..., 0] * 997 / 2
    # So many of 997 were kept, each with twice its weight.
    assert_close(kept, np.round(kept), 1e-4)
    assert 0.4 < (kept / 997).min() < (kept / 997).max() < 0.6
    whole = attend(alike, *arrays[1:2], ones, mask, keys=None, **given).y
    assert_close(whole, np.ones_like(whole))


def test_a_form_that_cannot_serve_falls_back_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        y = attended(Mask(), T, S, form="cudnn").y
    assert_close(y, attended(Mask(), T, S, form="reference").y)
    assert caplog.messages == [
        "attention: cudnn cannot serve: it runs on NVIDIA GPUs, not on cpu; using reference"
    ]


def test_auto_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        attended(Mask(Pattern(window=2)), T, T)
    assert not caplog.messages


def test_softmax_in_the_dtype_of_the_policy() -> None:
    def weights(dtype: str) -> Any:
        want = frozenset({"weights"})
        return attended(Mask(), T, S, softmax_dtype=dtype, want=want).aux["weights"]

    assert (weights("float32").dtype, weights("bfloat16").dtype) == ("float32", "bfloat16")
    assert_close(weights("bfloat16").astype("float32"), weights("float32"), 2**-6)
