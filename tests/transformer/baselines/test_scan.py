"""The loop over time against a loop in Python, with a cell that only adds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import array
from transformer import Mask
from transformer.attention.document_boundaries import (
    DocumentBoundaries,
    document_boundaries,
)
from transformer.baselines.recurrent import scan_cell

SEGMENTS = array([[1, 1, 0, 1, 2, 2, 0], [0, 3, 3, 3, 0, 5, 5]])
POSITIONS = array([[0, 1, 2, 3, 4, 5, 6]])


boundaries = jax.jit(document_boundaries, static_argnames=("backward", "cached"))


def add(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return total + x, total + x


def run_scan(
    timeline: DocumentBoundaries | None, x: Any, state: Any, seeds: Any = None
) -> tuple[Any, Any]:
    return jax.jit(lambda *given: scan_cell(add, *given))(state, x, timeline, seeds)


def test_single_document_without_timeline() -> None:
    assert document_boundaries(Mask(), POSITIONS) is None
    after, y = run_scan(None, array([[[1], [2], [4]]]), array([[10]]))
    assert (after.tolist(), y[..., 0].tolist()) == ([[17]], [[11, 13, 17]])


def test_documents_reset_and_padding_keeps_the_state() -> None:
    line = boundaries(Mask(segments=SEGMENTS), POSITIONS)
    after, y = run_scan(
        line, 2 ** np.arange(7)[None, :, None] * np.ones((2, 1, 1), int), array([[9]] * 2)
    )
    assert y[..., 0].tolist() == [[1, 3, 0, 11, 16, 48, 0], [0, 2, 6, 14, 0, 32, 96]]
    assert after[:, 0].tolist() == [48, 96]


def test_documents_start_from_their_seed() -> None:
    line = boundaries(Mask(segments=SEGMENTS[:1]), POSITIONS)
    seeds = 100 * SEGMENTS[:1, :, None]
    _, y = run_scan(line, np.ones((1, 7, 1), int), array([[9]]), seeds)
    assert y[..., 0].tolist() == [[101, 102, 0, 103, 201, 202, 0]]


def test_reversed_timeline() -> None:
    line = boundaries(Mask(segments=SEGMENTS[:1]), POSITIONS, backward=True)
    assert line is not None
    assert np.flatnonzero(line.is_start).tolist() == [1, 3]
    assert np.flatnonzero(~line.is_token).tolist() == [0, 4]


@pytest.mark.parametrize(
    ("positions", "sums"),
    [([3, 4], [10, 12]), ([0, 1], [1, 3]), ([8, 0], [10, 2]), ([4, -1], [10, 0])],
    ids=["goes on", "begins", "ends and begins", "padding"],
)
def test_decoding_follows_positions(positions: list[int], sums: list[int]) -> None:
    line = boundaries(Mask(), array([positions]), cached=True)
    after, y = run_scan(line, array([[[1], [2]]]), array([[9]]))
    assert y[0, :, 0].tolist() == sums
    assert after.tolist() == [[max(sums[-1], sums[-2] * (positions[-1] < 0))]]


def test_nonfinite_padding_gets_no_gradient() -> None:
    line = boundaries(Mask(segments=array([[0, 1, 0, 1]])), array([[0, 1, 2, 3]]))

    def total(x: jax.Array) -> jax.Array:
        cell = lambda h, x: (h + 1 / x, h + 1 / x)  # noqa: E731
        return jnp.sum(scan_cell(cell, jnp.zeros((1, 1)), jnp.where(x == 0, 1, x), line)[1])

    x = array([[[0.0], [2.0], [0.0], [4.0]]])
    assert jax.jit(jax.grad(total))(x).ravel().tolist() == [0, -0.5, 0, -0.0625]
