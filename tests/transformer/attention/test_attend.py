"""`attend` and its reference, against the formula."""

import functools
import logging
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import array, assert_close, normal, softmax
from transformer import Hardware, Mask, MaskPattern
from transformer.attention import attend as attend_module
from transformer.attention.attend import attend as attend_by_spec
from transformer.attention.backends.choose import BackendChoice
from transformer.attention.backends.query_blocks import num_query_blocks
from transformer.attention.masks import dense_mask
from transformer.attention.reference import ScoreSpec
from transformer.testing.mixer_under_test import reference_softmax_attention

B, T, S, N, K, H, VALUES = 2, 5, 7, 6, 3, 11, 13


def attend_eagerly(q: Any, k: Any, v: Any, mask: Mask, **fields: Any) -> Any:
    """Call `attend` with the fields of its ScoreSpec as keyword arguments."""
    names = ("backend", "outputs")
    options: Any = {name: fields.pop(name) for name in names if name in fields}
    return attend_by_spec(q, k, v, mask, ScoreSpec(**fields), hardware=Hardware(), **options)


STATIC = ("backend", "scale", "softmax_dtype", "dropout_rate", "outputs", "soft_cap", "bias")
attend = jax.jit(attend_eagerly, static_argnames=STATIC)


def inputs(queries: int, keys: int, kv_heads: int = K) -> tuple[Any, Any, Any]:
    return (
        normal(0, B, queries, N, H),
        normal(1, B, keys, kv_heads, H),
        normal(2, B, keys, kv_heads, VALUES),
    )


def attend_with_defaults(mask: Mask, queries: int, keys: int, **options: Any) -> Any:
    return attend(*inputs(queries, keys), mask, **dict(scale=H**-0.5) | options)


def test_reference_matches_formula() -> None:
    scale = 0.3
    segments = array([[1, 1, 0, 2, 2], [0] * 5])
    mask = Mask(segments=segments, key_segments=array([[1, 2, 2, 1, 0, 0, 2], [1] * 7]))
    output = attend_with_defaults(
        mask, T, S, scale=scale, backend="reference", outputs=frozenset({"weights"})
    )
    q, k, v = inputs(T, S)
    visible = np.asarray(dense_mask(mask, T, S))[:, None]
    # The formula divides by sqrt(H) itself.
    assert_close(output.y, reference_softmax_attention(q * scale * H**0.5, k, v, visible))
    weights = np.asarray(output.aux["weights"])
    assert weights.shape == (B, N, T, S)
    v_per_head = np.repeat(v, N // K, axis=2)
    assert_close(output.y, np.einsum("BNTS,BSNH->BTNH", weights, v_per_head))


@pytest.mark.parametrize(("length", "blocks"), [(127, 1), (128, 2), (191, 2), (192, 3), (4096, 4)])
def test_number_of_query_blocks(length: int, blocks: int) -> None:
    assert num_query_blocks(length) == blocks


def test_soft_cap_applies_tanh() -> None:
    q, k, v = inputs(T, S)
    y = attend_with_defaults(Mask(), T, S, scale=3.0, soft_cap=2.0).y
    k, v = (np.repeat(each, N // K, axis=2) for each in (k, v))
    scores = 2 * np.tanh(np.einsum("BTNH,BSNH->BNTS", q, k) * 3 / 2)
    assert np.abs(scores).max() > 1.99  # large enough to be capped
    weights = np.apply_along_axis(softmax, -1, scores)
    assert_close(y, np.einsum("BNTS,BSNH->BTNH", weights, v))


@pytest.mark.parametrize("pattern", [MaskPattern(causal=True), MaskPattern(window=3)])
def test_query_before_all_keys_gives_zeros(pattern: MaskPattern) -> None:
    """A causal mask, or a window, in cross attention."""
    mask = Mask(pattern, positions=array([[0, 3, 9, 11, 12]])).with_keys(array([np.arange(7) + 9]))
    visible = np.asarray(dense_mask(mask, T, S))
    assert visible[0].any(-1).tolist() == [False, False, True, True, True]
    y = attend_with_defaults(mask, T, S).y
    assert not np.any(y[:, :2])
    assert_close(y, reference_softmax_attention(*inputs(T, S), visible[:, None]))


def test_bias_is_added_to_scores() -> None:
    """The bias depends on the mask's positions and differs per head."""
    queries, keys = array([[3, 0, 1, 2, 9], [0, 1, 2, 3, 4]]), array([[0, 5, 1, 7, 2, 4, 3]])
    mask = Mask(positions=queries).with_keys(keys)

    def bias(queries: jax.Array, keys: jax.Array) -> jax.Array:
        slopes = jax.numpy.arange(N)[None, :, None, None] / 10
        return slopes * (keys[:, None, :] - 2 * queries[:, :, None])[:, None]

    outputs = frozenset({"weights"})
    output = attend_with_defaults(mask, T, S, scale=0.3, bias=bias, outputs=outputs)
    weights = np.asarray(output.aux["weights"])
    q, k, _ = inputs(T, S)
    for b, n, t in np.ndindex(B, N, T):
        added = n / 10 * (keys[0] - 2 * queries[b, t])
        scores = 0.3 * k[b, :, n // (N // K)] @ q[b, t, n] + added
        assert_close(weights[b, n, t], softmax(scores))


def test_dropout_rescales_kept_weights() -> None:
    mask, dropout_rngs = Mask(), jax.random.split(jax.random.key(0), B)
    arrays = inputs(T, 997)
    zero_queries = np.zeros_like(arrays[0])  # every weight is 1/997
    kwargs: dict[str, Any] = dict(scale=1.0, dropout_rate=0.5)
    ones = np.ones_like(arrays[2])
    y = attend(zero_queries, *arrays[1:2], ones, mask, dropout_rngs=dropout_rngs, **kwargs).y
    num_kept = np.asarray(y)[..., 0] * 997 / 2
    # `num_kept` of 997 weights were kept, each doubled.
    assert_close(num_kept, np.round(num_kept), 1e-4)
    assert 0.4 < (num_kept / 997).min() < (num_kept / 997).max() < 0.6
    without_dropout = attend(zero_queries, *arrays[1:2], ones, mask, dropout_rngs=None, **kwargs).y
    assert_close(without_dropout, np.ones_like(without_dropout))


@pytest.mark.parametrize(("rate", "has_keys"), [(0.5, True), (0.5, False), (0.0, True)])
def test_dropout_needs_a_rate_and_keys(
    rate: float, has_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that drop nothing serve the call without one of them."""
    chosen = []

    def choose(backend: Any, spec: Any) -> BackendChoice:
        chosen.append(spec.has_dropout)
        return BackendChoice("reference", "a test")

    monkeypatch.setattr(attend_module, "choose_backend", choose)
    rngs = jax.random.split(jax.random.key(0), B) if has_keys else None

    @jax.jit
    def both(q: Any, k: Any, v: Any, rngs: Any) -> Any:
        attend = functools.partial(attend_eagerly, q, k, v, Mask(), scale=0.3)
        return attend(dropout_rate=rate, dropout_rngs=rngs).y, attend().y

    y, plain = both(*inputs(T, S), rngs)
    assert chosen == [bool(rate) and has_keys, False]
    assert np.array_equal(y, plain) is not (rate > 0 and has_keys)


def test_unsupported_backend_falls_back_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        attend_with_defaults(Mask(MaskPattern(window=2)), T, T)
        y = attend_with_defaults(Mask(), T, S, backend="cudnn").y
    assert_close(y, attend_with_defaults(Mask(), T, S, backend="reference").y)
    assert len(caplog.messages) == 1  # not of `auto` or of the reference
    assert "cudnn cannot serve: it runs on NVIDIA GPUs" in caplog.text


def test_softmax_dtype_follows_precision_policy() -> None:
    def weights(dtype: str) -> Any:
        outputs = frozenset({"weights"})
        return attend_with_defaults(Mask(), T, S, softmax_dtype=dtype, outputs=outputs).aux[
            "weights"
        ]

    assert (weights("float32").dtype, weights("bfloat16").dtype) == ("float32", "bfloat16")
    assert_close(weights("bfloat16").astype("float32"), weights("float32"), 2**-6)
