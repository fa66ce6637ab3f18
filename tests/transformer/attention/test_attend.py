"""All backends of attention compute the formula."""

import functools
import logging
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, array, assert_close, normal, softmax
from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import ScoreSpec
from transformer.attention.attend import attend as attend_by_spec
from transformer.attention.backends.dispatch import num_query_blocks
from transformer.attention.masks import dense_mask
from transformer.attention.position_bias import RelativeTables, alibi_bias
from transformer.attention.scores import additive_scores
from transformer.testing.mixer_under_test import reference_softmax_attention

B, T, S, N, K, H, VALUES = 2, 5, 7, 6, 3, 11, 13


def attend_eagerly(
    *arrays: Any,
    hardware: Hardware,
    backend: Any = "auto",
    outputs: frozenset[str] = frozenset(),
    sink_logits: Any = None,
    **fields: Any,
) -> Any:
    """Call `attend` with the fields of its ScoreSpec as keyword arguments."""
    options: Any = dict(
        backend=backend, hardware=hardware, outputs=outputs, sink_logits=sink_logits
    )
    q, k, v, mask = arrays
    return attend_by_spec(q, k, v, mask, ScoreSpec(**fields), **options)


attend = jax.jit(
    attend_eagerly,
    static_argnames=(
        "backend",
        "hardware",
        "scale",
        "softmax_dtype",
        "dropout_rate",
        "outputs",
        "soft_cap",
    ),
)


def inputs(queries: int, keys: int, kv_heads: int = K) -> tuple[Any, Any, Any]:
    return (
        normal(0, B, queries, N, H),
        normal(1, B, keys, kv_heads, H),
        normal(2, B, keys, kv_heads, VALUES),
    )


def attend_with_defaults(mask: Mask, queries: int, keys: int, **options: Any) -> Any:
    options = dict(hardware=Hardware(), scale=H**-0.5) | options
    return attend(*inputs(queries, keys), mask, **options)


def documents(length: int) -> Any:  # [B, T]
    """Return segments of a few documents per row; the first row ends with padding."""
    starts = np.array([[0.2, 0.3, 0.9], [0.5, 0.7, 1.0]]) * length
    segments = 1 + (np.arange(length)[None, :, None] >= starts[:, None]).sum(-1)
    return np.where(segments == 4, 0, segments)


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


@pytest.mark.full
@pytest.mark.parametrize("backend", ["reference", "query_blocks", "blockwise"])
def test_query_without_visible_keys_gives_zeros_and_no_gradient(backend: Any) -> None:
    length = T if backend == "reference" else 131
    segments: Any = np.where(np.arange(length) % 3 == 1, 0, 1)[None].repeat(B, 0)
    mask = Mask(MaskPattern(causal=True), segments=segments)

    def total(arrays: Any, cotangent: Any) -> Any:
        return (
            attend(*arrays, mask, backend=backend, hardware=Hardware(), scale=1.0).y * cotangent
        ).sum()

    empty = (segments == 0)[..., None, None]
    y = attend_with_defaults(mask, length, length, backend=backend).y
    assert not np.any(np.where(empty, y, 0))
    assert np.any(y)
    gradients = jax.jit(jax.grad(total))(inputs(length, length), empty.astype(np.float32))
    assert not any(np.any(each) for each in gradients)  # neither NaN nor anything else
    gradients = jax.jit(jax.grad(total))(inputs(length, length), np.ones(empty.shape, np.float32))
    assert all(np.isfinite(each).all() and np.any(each) for each in gradients)
    assert not any(np.any(np.where(empty, each, 0)) for each in gradients)


@pytest.mark.parametrize(("length", "blocks"), [(127, 1), (128, 2), (191, 2), (192, 3), (4096, 4)])
def test_number_of_query_blocks(length: int, blocks: int) -> None:
    assert num_query_blocks(length) == blocks


MASKS: dict[str, Any] = {
    "causal": lambda length: Mask(MaskPattern(causal=True)),
    "segments": lambda length: Mask(MaskPattern(causal=True), segments=documents(length)),
    "window": lambda length: Mask(MaskPattern(causal=True, window=37, dilation=3)),
    "lengths and globals": lambda length: Mask(
        MaskPattern(causal=True, window=5),
        key_lengths=array([length, 71]),
        global_positions=array([[3, 70]]),
    ),
    "an array": lambda length: Mask(MaskPattern(causal=True), allowed=random_pairs(length)),
    "a prefix": lambda length: Mask(
        MaskPattern(causal=True, prefix=True),
        prefix_lengths=array([97, 0]),
        segments=documents(length),
    ),
}


def random_pairs(length: int) -> Any:  # [B, T, T]
    return np.random.default_rng(0).random((B, length, length)) < 0.2


def alibi_fields() -> dict[str, Any]:
    """Return a bias per head that depends on positions, which restart in every document."""
    return dict(bias=functools.partial(alibi_bias, N))


def relative_table_fields() -> dict[str, Any]:
    return dict(relative_tables=RelativeTables(normal(4, 5, H), normal(5, 5, VALUES)))


def mlp_score_fields() -> dict[str, Any]:
    return dict(score_fn=functools.partial(additive_scores, normal(6, N, H)))


SCORE_FIELDS: dict[str, Any] = {
    "plain": dict,
    "a bias": alibi_fields,
    "tables": relative_table_fields,
    "an MLP": mlp_score_fields,
}


@pytest.mark.sampled("segments-3-plain", "lengths and globals", "an MLP")
@pytest.mark.parametrize(
    ("length", "masks", "kv_heads", "extras"),
    [
        (131, "causal", N, "plain"),
        (131, "segments", K, "plain"),
        (131, "window", 1, "plain"),
        (257, "lengths and globals", K, "plain"),
        (131, "an array", K, "plain"),
        (131, "segments", K, "a bias"),
        (131, "segments", K, "tables"),
        (131, "causal", K, "an MLP"),
    ],
)
def test_query_blocks_match_reference(length: int, masks: str, kv_heads: int, extras: str) -> None:
    mask, score_fields = MASKS[masks](length), SCORE_FIELDS[extras]()
    arrays, cotangent = inputs(length, length, kv_heads), normal(3, B, length, N, VALUES)

    def values_and_gradients_of(backend: Any) -> tuple[Array, tuple[Array, ...]]:
        def run(arrays: Any) -> Any:
            kwargs: dict[str, Any] = (
                dict(backend=backend, hardware=Hardware(), scale=0.3) | score_fields
            )
            q, k, v = arrays
            return attend_eagerly(q, k, v, mask, **kwargs).y

        def values_and_gradients(arrays: Any) -> Any:
            y, vjp_fn = jax.vjp(run, arrays)
            return y, vjp_fn(cotangent)[0]

        y, gradients = jax.jit(values_and_gradients)(arrays)
        return y, gradients

    (y, gradients), (expected, expected_gradients) = (
        values_and_gradients_of("query_blocks"),
        values_and_gradients_of("reference"),
    )
    assert_close(y, expected)
    for actual, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, expected_gradient)


def test_soft_cap_applies_tanh() -> None:
    q, k, v = inputs(T, S)
    y = attend_with_defaults(Mask(), T, S, scale=3.0, soft_cap=2.0).y
    k, v = (np.repeat(each, N // K, axis=2) for each in (k, v))
    scores = 2 * np.tanh(np.einsum("BTNH,BSNH->BNTS", q, k) * 3 / 2)
    assert np.abs(scores).max() > 1.99  # large enough to be capped
    weights = np.apply_along_axis(softmax, -1, scores)
    assert_close(y, np.einsum("BNTS,BSNH->BTNH", weights, v))


@pytest.mark.parametrize("backend", ["reference", "query_blocks", "blockwise"])
def test_sink_adds_a_key_without_a_value(backend: Any) -> None:
    length = 131
    q, k, v = inputs(length, length, N)
    sinks = normal(7, N)
    mask = Mask(MaskPattern(causal=True), segments=documents(length))
    y = attend(q, k, v, mask, backend=backend, hardware=Hardware(), scale=0.3, sink_logits=sinks).y
    visible = np.asarray(dense_mask(mask, length, length))[:, None]
    exp_scores = np.where(visible, np.exp(0.3 * np.einsum("BTNH,BSNH->BNTS", q, k)), 0)
    weights = exp_scores / (exp_scores.sum(-1, keepdims=True) + np.exp(sinks)[None, :, None, None])
    assert_close(y, np.einsum("BNTS,BSNH->BTNH", weights, v))


@pytest.mark.parametrize("backend", ["auto", "query_blocks"])
def test_prefix_is_visible_to_earlier_queries(
    backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mask = MASKS["a prefix"](131)
    with caplog.at_level(logging.WARNING):
        y = attend_with_defaults(mask, 131, 131, backend=backend).y
    visible = np.asarray(dense_mask(mask, 131, 131))[:, None]
    assert visible[0, 0, 64, 90]  # later in the same document, inside the prefix
    assert_close(y, reference_softmax_attention(*inputs(131, 131), visible))
    assert ("query_blocks cannot serve" in caplog.text) is (backend == "query_blocks")


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

    def run(q: Any, k: Any, v: Any) -> Any:
        kwargs: Any = dict(hardware=Hardware(), scale=0.3, bias=bias)
        return attend_eagerly(q, k, v, mask, outputs=frozenset({"weights"}), **kwargs)

    weights = np.asarray(jax.jit(run)(*inputs(T, S)).aux["weights"])
    q, k, _ = inputs(T, S)
    for b, n, t in np.ndindex(B, N, T):
        added = n / 10 * (keys[0] - 2 * queries[b, t])
        scores = 0.3 * k[b, :, n // (N // K)] @ q[b, t, n] + added
        assert_close(weights[b, n, t], softmax(scores))


def test_dropout_rescales_kept_weights() -> None:
    mask, dropout_rngs = Mask(), jax.random.split(jax.random.key(0), B)
    arrays = inputs(T, 997)
    zero_queries = np.zeros_like(arrays[0])  # every weight is 1/997
    kwargs: dict[str, Any] = dict(hardware=Hardware(), scale=1.0, dropout_rate=0.5)
    ones = np.ones_like(arrays[2])
    y = attend(zero_queries, *arrays[1:2], ones, mask, dropout_rngs=dropout_rngs, **kwargs).y
    num_kept = np.asarray(y)[..., 0] * 997 / 2
    # `num_kept` of 997 weights were kept, each doubled.
    assert_close(num_kept, np.round(num_kept), 1e-4)
    assert 0.4 < (num_kept / 997).min() < (num_kept / 997).max() < 0.6
    without_dropout = attend(zero_queries, *arrays[1:2], ones, mask, dropout_rngs=None, **kwargs).y
    assert_close(without_dropout, np.ones_like(without_dropout))


def test_unsupported_backend_falls_back_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        y = attend_with_defaults(Mask(), T, S, backend="cudnn").y
    assert_close(y, attend_with_defaults(Mask(), T, S, backend="reference").y)
    assert "cudnn cannot serve: it runs on NVIDIA GPUs" in caplog.text


def test_auto_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        attend_with_defaults(Mask(MaskPattern(window=2)), T, T)
    assert not caplog.messages


def test_softmax_dtype_follows_precision_policy() -> None:
    def weights(dtype: str) -> Any:
        outputs = frozenset({"weights"})
        return attend_with_defaults(Mask(), T, S, softmax_dtype=dtype, outputs=outputs).aux[
            "weights"
        ]

    assert (weights("float32").dtype, weights("bfloat16").dtype) == ("float32", "bfloat16")
    assert_close(weights("bfloat16").astype("float32"), weights("float32"), 2**-6)
