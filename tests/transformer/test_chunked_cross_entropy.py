"""Cross entropy in chunks against the formula, a loop over tokens, and itself in one chunk."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.transformer.formulas import Array, array, assert_close, assert_trees_close, normal
from transformer import Hardware
from transformer.chunked_cross_entropy import ChunkedCrossEntropy, choose_num_chunks

B, T, D, V, ROWS = 3, 7, 5, 11, 16
HIDDEN, MATRIX = 2 * normal(0, B, T, D), normal(1, D, ROWS)
TARGETS: Any = np.random.default_rng(2).integers(0, V, (B, T))
WEIGHTS: Any = np.random.default_rng(3).uniform(0, 2, (B, T)).astype(np.float32)
WEIGHTS[0, 2] = WEIGHTS[2, 6] = 0


def looped(hidden: Array, matrix: Array) -> tuple[float, Array, Array]:
    """Token by token in float64: the loss and its gradients, softmax minus the target."""
    total, d_hidden, d_matrix = 0.0, np.zeros(hidden.shape), np.zeros(matrix.shape)
    for b, t in np.ndindex(B, T):
        h = hidden[b, t].astype(np.float64)
        shares = np.exp(h @ matrix[:, :V])
        shares /= shares.sum()
        total -= WEIGHTS[b, t] * math.log(shares[TARGETS[b, t]])
        shares[TARGETS[b, t]] -= 1
        d_hidden[b, t] = WEIGHTS[b, t] * (matrix[:, :V] @ shares)
        d_matrix[:, :V] += WEIGHTS[b, t] * np.outer(h, shares)
    return total, d_hidden, d_matrix


def computed(form: ChunkedCrossEntropy, hidden: Any = HIDDEN, factor: float = 1.0) -> Any:
    """(loss, its gradients in hidden and matrix), of `factor` times the loss."""

    def total(hidden: Any, matrix: Any) -> Any:
        loss = form(hidden, matrix, TARGETS, WEIGHTS)
        return factor * loss, loss

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    (_, loss), gradients = run(hidden, MATRIX)
    return loss, *gradients


@pytest.mark.parametrize(("chunks", "unroll"), [(1, False), (2, False), (7, False), (4, True)])
def test_chunked_equals_looped(chunks: int, unroll: bool) -> None:
    loss, d_hidden, d_matrix = computed(ChunkedCrossEntropy(V, chunks, unroll))
    total, expected_hidden, expected_matrix = looped(HIDDEN, MATRIX)
    assert_close(loss, total)
    assert_close(d_hidden, expected_hidden)
    assert_close(d_matrix, expected_matrix)


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_value_alone_is_the_same(chunks: int) -> None:
    loss = jax.jit(ChunkedCrossEntropy(V, chunks))(HIDDEN, MATRIX, TARGETS, WEIGHTS)
    assert_close(loss, looped(HIDDEN, MATRIX)[0])


def six(spread: bool, chunks: int) -> Any:
    """The loss of six tokens a row and its gradients in hidden and matrix, as a function."""
    form = ChunkedCrossEntropy(V, chunks, context_sharded=spread)

    def total(hidden: Any, matrix: Any) -> Any:
        return form(hidden, matrix, TARGETS[:, :6], WEIGHTS[:, :6])

    return jax.value_and_grad(total, argnums=(0, 1))


@pytest.mark.parametrize("chunks", [1, 3])  # that divide what each device has
def test_tokens_that_are_spread_over_devices_stay_there(chunks: int) -> None:
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec(None, "context"))
    whole = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(
        six(spread=True, chunks=chunks),
        in_shardings=(rows, whole),
        out_shardings=(whole, (rows, whole)),
    )
    found = run(HIDDEN[:, :6], MATRIX)
    whole_rows = jax.jit(six(spread=False, chunks=1))(HIDDEN[:, :6], MATRIX)
    assert_trees_close(found, whole_rows)
    program = run.lower(HIDDEN[:, :6], MATRIX).compile().as_text() or ""
    assert "all-gather" not in program
    assert "all-to-all" not in program


def test_gradients_scale_with_what_comes_back() -> None:
    _, d_hidden, d_matrix = computed(ChunkedCrossEntropy(V, 3), factor=-3.0)
    _, expected_hidden, expected_matrix = looped(HIDDEN, MATRIX)
    assert_close(d_hidden, -3 * expected_hidden)
    assert_close(d_matrix, -3 * expected_matrix)


BIAS: Any = np.random.default_rng(4).normal(size=ROWS).astype(np.float32)


def smoothed(
    hidden: Any, matrix: Any, bias: Any, *, share: float
) -> tuple[Any, tuple[Array, Array, Array]]:
    """The plain formula over all logits at once, and its gradients in all three, in float64."""
    goal = np.full((B, T, V), share / V)
    np.put_along_axis(goal, TARGETS[..., None], 1 - share + share / V, axis=-1)
    logits = hidden.astype(np.float64) @ matrix[:, :V] + bias[:V]
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    total = -(WEIGHTS[..., None] * goal * np.log(chances)).sum()
    d_logits = WEIGHTS[..., None] * (chances - goal)
    d_matrix, d_bias = np.zeros(matrix.shape), np.zeros(ROWS)
    d_matrix[:, :V] = np.einsum("btd,btv->dv", hidden, d_logits)
    d_bias[:V] = d_logits.sum(axis=(0, 1))
    return total, (d_logits @ matrix[:, :V].T, d_matrix, d_bias)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.7])
def test_smoothing_and_a_bias_are_those_of_the_formula(chunks: int, share: float) -> None:
    form = ChunkedCrossEntropy(V, chunks, label_smoothing=share)

    def total(hidden: Any, matrix: Any, bias: Any) -> Any:
        return form(hidden, matrix, TARGETS, WEIGHTS, bias)

    found, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(HIDDEN, MATRIX, BIAS)
    expected, expected_gradients = smoothed(HIDDEN, MATRIX, BIAS, share=share)
    assert_close(found, expected)
    assert_close(jax.jit(total)(HIDDEN, MATRIX, BIAS), expected)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("chunks", [1, 3])
def test_accuracy_is_the_share_of_likeliest_words(chunks: int) -> None:
    """The bias decides some argmaxes, and padding would win if it counted."""
    bias = BIAS.copy()
    bias[V:] = 99
    best = np.argmax((HIDDEN @ MATRIX[:, :V]) + bias[:V], axis=-1)
    right = np.where(np.arange(B * T).reshape(B, T) % 3 == 0, best, (best + 1) % V)
    form = ChunkedCrossEntropy(V, chunks)
    found = jax.jit(form.accuracy)(HIDDEN, MATRIX, right, WEIGHTS, bias)
    assert_close(found, WEIGHTS[right == best].sum())


def test_what_has_no_weight_counts_nothing() -> None:
    _, d_hidden, _ = computed(ChunkedCrossEntropy(V, 2))
    assert not np.any(np.asarray(d_hidden)[WEIGHTS == 0])
    loss = jax.jit(ChunkedCrossEntropy(V, 2))(HIDDEN, MATRIX, TARGETS, np.zeros_like(WEIGHTS))
    assert float(loss) == 0


@pytest.mark.parametrize("number", [-100, -1, V, ROWS + 5, 2**31 - 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_target_without_weight_may_be_any_number(number: int, smoothing: float) -> None:
    """-100 is what PyTorch's cross entropy ignores."""
    form = ChunkedCrossEntropy(V, 2, label_smoothing=smoothing)

    def both(targets: Any) -> Any:
        def total(hidden: Any) -> jax.Array:
            return form(hidden, MATRIX, targets, WEIGHTS)

        accuracy = form.accuracy(HIDDEN, MATRIX, targets, WEIGHTS)
        return *jax.jit(jax.value_and_grad(total))(HIDDEN), accuracy

    found = both(np.where(WEIGHTS == 0, number, TARGETS))
    for one, other in zip(found, both(TARGETS), strict=True):
        np.testing.assert_array_equal(one, other)


def test_words_of_the_padding_have_no_share_and_no_gradient() -> None:
    loss, _, d_matrix = computed(ChunkedCrossEntropy(V, 2))
    assert not np.any(np.asarray(d_matrix)[:, V:])
    without: Any = MATRIX[:, :V]
    bare = jax.jit(ChunkedCrossEntropy(V, 2))(HIDDEN, without, TARGETS, WEIGHTS)
    assert_close(bare, loss, 1e-6)


def test_by_hand() -> None:
    """Logits (ln 3, 0): the words have shares 3/4 and 1/4."""
    hidden, matrix = array([[[1.0], [1.0]]]), array([[math.log(3.0), 0.0]])
    loss = ChunkedCrossEntropy(2)(
        hidden.astype("float32"), matrix.astype("float32"), array([[0, 1]]), array([[1.0, 0.5]])
    )
    assert float(loss) == pytest.approx(math.log(4 / 3) + 0.5 * math.log(4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_summed_in_float32(dtype: str) -> None:
    hidden = jnp.asarray(HIDDEN, dtype)
    loss, d_hidden, d_matrix = computed(ChunkedCrossEntropy(V, 3), hidden)
    assert (loss.dtype, d_hidden.dtype, d_matrix.dtype) == ("float32", dtype, "float32")
    rounded = np.asarray(jnp.asarray(MATRIX, dtype), np.float32)
    total, expected_hidden, expected_matrix = looped(np.asarray(hidden, np.float32), rounded)
    assert_close(loss, total, 1e-6)
    assert_close(d_hidden.astype("float32"), expected_hidden, 2**-6)
    assert_close(d_matrix, expected_matrix, 2**-6)


@functools.cache
def largest_array(chunks: int, unroll: bool) -> int:
    """Elements of the largest array in the compiled program of the loss and its gradients."""
    form = ChunkedCrossEntropy(V, chunks, unroll)
    abstract: Any = [jax.ShapeDtypeStruct(s, "float32") for s in ((4, 64, D), (D, 1009))]
    rest: Any = (np.zeros((4, 64), int), np.ones((4, 64), np.float32))

    def total(hidden: Any, matrix: Any) -> Any:
        return form(hidden, matrix, *rest)

    compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(*abstract).compile()
    program = str(compiled.as_text())
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize(("chunks", "unroll"), [(4, False), (8, False), (4, True)])
def test_logits_of_the_whole_batch_never_exist(chunks: int, unroll: bool) -> None:
    assert largest_array(1, False) == 4 * 64 * 1009
    assert largest_array(chunks, unroll) == 4 * 64 // chunks * 1009


@pytest.mark.parametrize(
    ("batch", "length", "rows", "hardware", "chunks"),
    [
        (12, 64, 128, Hardware("cpu"), 1),
        (2, 512, 50_304, Hardware("cpu"), 4),  # 196.5 MiB of logits, 64 a chunk
        (16, 1024, 50_304, Hardware("gpu"), 7),  # 3,144 MiB, 512 a chunk
        (16, 1024, 50_304, Hardware("gpu", count=8), 1),  # 393 on each of eight
        (9, 1024, 50_304, Hardware("tpu", count=8), 1),  # two examples on the fullest
        (4096, 3, 50_304, Hardware("cpu"), 3),  # not more chunks than tokens
    ],
)
def test_a_chunk_fits_a_budget(
    batch: int, length: int, rows: int, hardware: Hardware, chunks: int
) -> None:
    assert choose_num_chunks(batch, length, rows, hardware) == chunks
