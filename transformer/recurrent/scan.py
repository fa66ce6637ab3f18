"""The loop over time that all recurrences share.

A state begins anew at the first token of each document and stands still at padding. Decoding goes
on from a state that came in: there position 0 begins a document, and padding has position -1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.documents import previous_segments, token_segments
from transformer.masks import Mask

RecurrentCell = Callable[[Any, Any], tuple[Any, Any]]
"""(state [B, ...], inputs of one token [B, ...]) -> (state, output [B, ...])."""


class DocumentBoundaries(NamedTuple):
    """What happens to the state at each token."""

    is_start: jax.Array  # [B or 1, T] whether a document begins here
    is_token: jax.Array  # [B or 1, T] whether there is a token, and no padding


def document_boundaries(
    mask: Mask,
    positions: jax.Array,  # [B or 1, T]
    *,
    cached: bool = False,
    backward: bool = False,
) -> DocumentBoundaries | None:
    """What segments, lengths and positions say of a row; None: one document, from its beginning.

    With `backward` it is that of the row read from its end.
    """
    segments = token_segments(mask, positions.shape[1])
    if backward and segments is not None:
        segments = jnp.flip(segments, axis=1)
    if cached:
        real = positions >= 0 if segments is None else (positions >= 0) & (segments != 0)
        return DocumentBoundaries((positions == 0) & real, real)
    if segments is None:
        return None
    return DocumentBoundaries(
        (segments != 0) & (segments != previous_segments(segments)), segments != 0
    )


def scan_cell(
    cell: RecurrentCell,
    state: Any,  # [B, ...] before the first token
    inputs: Any,  # [B, T, ...]
    boundaries: DocumentBoundaries | None,
    initial_states: Any = None,  # [B, T, ...] what a state is when a document begins; None: zeros.
    # Without a timeline no document begins, and they are not looked at
) -> tuple[Any, Any]:  # the state after the last token, the outputs [B, T, ...]
    """Runs the cell over the tokens of a row. The outputs of padding are zeros."""

    def step(state: Any, now: tuple[Any, DocumentBoundaries | None, Any]) -> tuple[Any, Any]:
        x, at, seed = now
        if at is None:
            return cell(state, x)
        seed = jax.tree.map(jnp.zeros_like, state) if seed is None else seed
        before = _choose(at.is_start, seed, state)
        after, y = cell(before, x)
        return _choose(at.is_token, after, before), y

    initial_states = None if boundaries is None else initial_states
    state, y = jax.lax.scan(step, state, _swapped((inputs, boundaries, initial_states)))
    y = _swapped(y)
    if boundaries is not None:
        y = jax.tree.map(lambda leaf: jnp.where(_spread(boundaries.is_token, leaf), leaf, 0), y)
    return state, y


def _choose(flags: jax.Array, chosen: Any, otherwise: Any) -> Any:
    """One state where the flags [B or 1] are set, the other elsewhere."""
    pick = lambda a, b: jnp.where(_spread(flags, b), a, b)  # noqa: E731
    return jax.tree.map(pick, chosen, otherwise)


def _spread(flags: jax.Array, like: jax.Array) -> jax.Array:
    """Flags with as many axes as what they choose from."""
    return flags.reshape(flags.shape + (1,) * (like.ndim - flags.ndim))


def _swapped(tree: Any) -> Any:
    """[B, T, ...] <-> [T, B, ...]."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)
