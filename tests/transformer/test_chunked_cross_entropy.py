"""Cross-entropy in chunks against the formula, a loop over tokens, and itself in one chunk."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.transformer.compiled import largest_array
from tests.transformer.formulas import Array, assert_close, assert_trees_close, normal
from transformer import Hardware
from transformer.chunked_cross_entropy import (
    ChunkedCrossEntropy,
    choose_num_chunks,
    logsumexp_in_one_pass,
)

B, T, D, V, ROWS = 3, 7, 5, 11, 16
HIDDEN, MATRIX = 2 * normal(0, B, T, D), normal(1, D, ROWS)
TARGETS: Any = np.random.default_rng(2).integers(0, V, (B, T))
WEIGHTS: Any = np.random.default_rng(3).uniform(0, 2, (B, T)).astype(np.float32)
WEIGHTS[0, 2] = WEIGHTS[2, 6] = 0


def expected_by_loop(hidden: Array, matrix: Array) -> tuple[float, Array, Array]:
    """Compute the loss and its gradients, softmax minus the target, token by token in float64."""
    total, d_hidden, d_matrix = 0.0, np.zeros(hidden.shape), np.zeros(matrix.shape)
    for b, t in np.ndindex(B, T):
        h = hidden[b, t].astype(np.float64)
        probs = np.exp(h @ matrix[:, :V])
        probs /= probs.sum()
        total -= WEIGHTS[b, t] * math.log(probs[TARGETS[b, t]])
        probs[TARGETS[b, t]] -= 1
        d_hidden[b, t] = WEIGHTS[b, t] * (matrix[:, :V] @ probs)
        d_matrix[:, :V] += WEIGHTS[b, t] * np.outer(h, probs)
    return total, d_hidden, d_matrix


def value_and_gradients(
    form: ChunkedCrossEntropy, hidden: Any = HIDDEN, factor: float = 1.0
) -> Any:
    """Return (loss, gradients in hidden and matrix) of `factor` times the loss."""

    def total(hidden: Any, matrix: Any) -> Any:
        loss = form(hidden, matrix, TARGETS, WEIGHTS)
        return factor * loss, loss

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, loss), gradients = run(hidden, MATRIX)
    return loss, *gradients


@pytest.mark.parametrize(("chunks", "one_pass"), [(1, False), (2, True), (4, True)])
def test_matches_loop_over_tokens(chunks: int, one_pass: bool) -> None:
    form = ChunkedCrossEntropy(V, chunks, one_pass=one_pass)
    loss, d_hidden, d_matrix = value_and_gradients(form)
    total, expected_hidden, expected_matrix = expected_by_loop(HIDDEN, MATRIX)
    assert_close(loss, total)
    assert_close(d_hidden, expected_hidden)
    assert_close(d_matrix, expected_matrix)


def run_on_six_tokens(spread: bool, chunks: int) -> Any:
    """Return a function of hidden and matrix: the loss of six tokens a row, and its gradients."""
    form = ChunkedCrossEntropy(V, chunks, context_sharded=spread)

    def total(hidden: Any, matrix: Any) -> Any:
        return form(hidden, matrix, TARGETS[:, :6], WEIGHTS[:, :6])

    return jax.value_and_grad(total, argnums=(0, 1))


def test_sharded_tokens_stay_on_their_devices() -> None:
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec(None, "context"))
    full = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(
        run_on_six_tokens(spread=True, chunks=3),
        in_shardings=(rows, full),
        out_shardings=(full, (rows, full)),
    )
    actual = run(HIDDEN[:, :6], MATRIX)
    whole_rows = jax.jit(run_on_six_tokens(spread=False, chunks=1))(HIDDEN[:, :6], MATRIX)
    assert_trees_close(actual, whole_rows)
    program = run.lower(HIDDEN[:, :6], MATRIX).compile().as_text() or ""
    assert "all-gather" not in program
    assert "all-to-all" not in program


def test_gradients_scale_with_the_cotangent() -> None:
    _, d_hidden, d_matrix = value_and_gradients(ChunkedCrossEntropy(V, 3), factor=-3.0)
    _, expected_hidden, expected_matrix = expected_by_loop(HIDDEN, MATRIX)
    assert_close(d_hidden, -3 * expected_hidden)
    assert_close(d_matrix, -3 * expected_matrix)


BIAS: Any = np.random.default_rng(4).normal(size=ROWS).astype(np.float32)


def expected_smoothed(
    hidden: Any, matrix: Any, bias: Any, *, smoothing: float
) -> tuple[Any, tuple[Array, Array, Array]]:
    """Compute the formula over all logits at once, and its three gradients, in float64."""
    target_distribution = np.full((B, T, V), smoothing / V)
    np.put_along_axis(
        target_distribution, TARGETS[..., None], 1 - smoothing + smoothing / V, axis=-1
    )
    logits = hidden.astype(np.float64) @ matrix[:, :V] + bias[:V]
    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    total = -(WEIGHTS[..., None] * target_distribution * np.log(probs)).sum()
    d_logits = WEIGHTS[..., None] * (probs - target_distribution)
    d_matrix, d_bias = np.zeros(matrix.shape), np.zeros(ROWS)
    d_matrix[:, :V] = np.einsum("btd,btv->dv", hidden, d_logits)
    d_bias[:V] = d_logits.sum(axis=(0, 1))
    return total, (d_logits @ matrix[:, :V].T, d_matrix, d_bias)


@pytest.mark.parametrize(("smoothing", "chunks"), [(0.0, 3), (0.1, 1), (0.7, 3)])
def test_label_smoothing_and_bias_match_formula(smoothing: float, chunks: int) -> None:
    form = ChunkedCrossEntropy(V, chunks, label_smoothing=smoothing)

    def total(hidden: Any, matrix: Any, bias: Any) -> Any:
        return form(hidden, matrix, TARGETS, WEIGHTS, bias)

    actual, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(HIDDEN, MATRIX, BIAS)
    expected, expected_gradients = expected_smoothed(HIDDEN, MATRIX, BIAS, smoothing=smoothing)
    assert_close(actual, expected)
    assert_close(jax.jit(total)(HIDDEN, MATRIX, BIAS), expected)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert_close(one, other)


def test_accuracy_is_the_fraction_of_correct_argmaxes() -> None:
    """The bias decides some argmaxes, and vocabulary padding would win if it counted."""
    bias = BIAS.copy()
    bias[V:] = 99
    best = np.argmax((HIDDEN @ MATRIX[:, :V]) + bias[:V], axis=-1)
    right = np.where(np.arange(B * T).reshape(B, T) % 3 == 0, best, (best + 1) % V)
    form = ChunkedCrossEntropy(V, 3)
    actual = jax.jit(form.accuracy)(HIDDEN, MATRIX, right, WEIGHTS, bias)
    assert_close(actual, WEIGHTS[right == best].sum())


@pytest.mark.parametrize(("number", "smoothing"), [(-100, 0.0), (V, 0.0), (2**31 - 1, 0.1)])
def test_targets_of_weight_0_may_be_any_number(number: int, smoothing: float) -> None:
    """-100 is what PyTorch's cross entropy ignores."""
    form = ChunkedCrossEntropy(V, 2, label_smoothing=smoothing)

    @jax.jit
    def both(targets: Any) -> Any:
        def total(hidden: Any) -> jax.Array:
            return form(hidden, MATRIX, targets, WEIGHTS)

        return *jax.value_and_grad(total)(HIDDEN), form.accuracy(HIDDEN, MATRIX, targets, WEIGHTS)

    actual = both(np.where(WEIGHTS == 0, number, TARGETS))
    for one, other in zip(actual, both(TARGETS), strict=True):
        np.testing.assert_array_equal(one, other)


def test_matrix_without_vocabulary_padding_gives_the_same_loss() -> None:
    padded, bare = (
        jax.jit(ChunkedCrossEntropy(V, 2))(HIDDEN, each, TARGETS, WEIGHTS)
        for each in (MATRIX, MATRIX[:, :V])
    )
    assert_close(padded, bare, 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_inputs_accumulate_in_float32(dtype: str) -> None:
    hidden = jnp.asarray(HIDDEN, dtype)
    loss, d_hidden, d_matrix = value_and_gradients(ChunkedCrossEntropy(V, 3), hidden)
    assert (loss.dtype, d_hidden.dtype, d_matrix.dtype) == ("float32", dtype, "float32")
    rounded = np.asarray(jnp.asarray(MATRIX, dtype), np.float32)
    total, expected_hidden, expected_matrix = expected_by_loop(
        np.asarray(hidden, np.float32), rounded
    )
    assert_close(loss, total, 1e-6)
    assert_close(d_hidden.astype("float32"), expected_hidden, 2**-6)
    assert_close(d_matrix, expected_matrix, 2**-6)


@pytest.mark.parametrize("chunks", [1, 4])
def test_full_logits_are_never_materialized(chunks: int) -> None:
    form = ChunkedCrossEntropy(V, chunks)
    rest: Any = (np.zeros((4, 64), int), np.ones((4, 64), np.float32))
    loss = jax.value_and_grad(lambda *arrays: form(*arrays, *rest), argnums=(0, 1))
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 64, D), (D, 1009))]
    assert largest_array(loss, *arrays) == 4 * 64 // chunks * 1009


@pytest.mark.parametrize(
    ("batch", "length", "rows", "hardware", "chunks"),
    [
        (12, 64, 128, Hardware("cpu"), 1),
        (2, 512, 50_304, Hardware("cpu"), 1),  # 1,024 tokens; 1,152 are half as many again as D
        (4, 512, 50_304, Hardware("cpu"), 2),
        (16, 1024, 50_304, Hardware("gpu"), 4),  # 3,144 MiB, 1,024 a chunk
        (32, 1024, 50_304, Hardware("gpu"), 8),  # 7 would suffice, and not divide the length
        (8, 509, 50_304, Hardware("cpu"), 4),  # nothing divides a prime length
        (16, 1024, 50_304, Hardware("gpu", count=8), 1),  # 393 on each of eight devices
        (9, 1024, 50_304, Hardware("tpu", count=8), 1),  # two examples on the fullest device
        (4096, 3, 50_304, Hardware("cpu"), 3),  # not more chunks than tokens
    ],
)
def test_chunk_size_fits_the_memory_budget(
    batch: int, length: int, rows: int, hardware: Hardware, chunks: int
) -> None:
    assert choose_num_chunks(batch, length, 768, rows, hardware) == chunks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logsumexp_in_one_pass_of_many_equal_numbers(dtype: str) -> None:
    """A sum of 16-bit numbers would stop growing at 256 or 2,048."""
    run = jax.jit(logsumexp_in_one_pass, static_argnums=1)
    result = run(np.zeros((2, 50_257), jnp.dtype(dtype)), -1)
    assert result.dtype == dtype
    np.testing.assert_allclose(np.asarray(result, np.float32), np.log(50_257), rtol=4e-3)


def test_second_derivatives_exist_in_one_pass_too() -> None:
    def curvature(one_pass: bool) -> jax.Array:
        form = ChunkedCrossEntropy(V, 2, one_pass=one_pass)
        slope = jax.grad(lambda hidden: form(hidden, MATRIX, TARGETS, WEIGHTS))
        return jax.jit(jax.grad(lambda hidden: jnp.sum(slope(hidden) ** 2)))(HIDDEN)

    assert_close(curvature(True), curvature(False))


def test_rounded_factor_does_not_change_16_bit_gradients() -> None:
    hidden = jnp.asarray(HIDDEN, jnp.bfloat16)
    form = ChunkedCrossEntropy(V, 1)
    run = jax.jit(jax.grad(lambda h, factor: factor * form(h, MATRIX, TARGETS, WEIGHTS)))
    whole, part = (run(hidden, factor) for factor in (1.0, 1 / 12_000))
    ratio = np.asarray(part, np.float32).sum() * 12_000 / np.asarray(whole, np.float32).sum()
    assert abs(ratio - 1) < 1e-3
