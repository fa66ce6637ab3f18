"""The loop over time that all recurrences share.

A state begins anew at the first token of each document and stands still at padding. Decoding goes
on from a state that came in: there position 0 begins a document, and padding has position -1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer.documents import document_before, documents
from transformer.masks import Mask

Cell = Callable[[Any, Any], tuple[Any, Any]]
"""(state [B, ...], inputs of one token [B, ...]) -> (state, output [B, ...])."""


class Timeline(NamedTuple):
    """What happens to the state at each token."""

    begins: jax.Array  # [B or 1, T] whether a document begins here
    real: jax.Array  # [B or 1, T] whether there is a token, and no padding


def timeline(
    mask: Mask,
    positions: jax.Array,  # [B or 1, T]
    *,
    cached: bool = False,
    backward: bool = False,
) -> Timeline | None:
    """What segments, lengths and positions say of a row; None: one document, from its beginning.

    With `backward` it is that of the row read from its end.
    """
    segments = documents(mask, positions.shape[1])
    if backward and segments is not None:
        segments = jnp.flip(segments, axis=1)
    if cached:
        real = positions >= 0 if segments is None else (positions >= 0) & (segments != 0)
        return Timeline((positions == 0) & real, real)
    if segments is None:
        return None
    return Timeline((segments != 0) & (segments != document_before(segments)), segments != 0)


def recur(
    cell: Cell,
    state: Any,  # [B, ...] before the first token
    inputs: Any,  # [B, T, ...]
    line: Timeline | None,
    seeds: Any = None,  # [B, T, ...] what a state is when a document begins; None: zeros.
    # Without a timeline no document begins, and they are not looked at
) -> tuple[Any, Any]:  # the state after the last token, the outputs [B, T, ...]
    """Runs the cell over the tokens of a row. The outputs of padding are zeros."""

    def step(state: Any, now: tuple[Any, Timeline | None, Any]) -> tuple[Any, Any]:
        x, at, seed = now
        if at is None:
            return cell(state, x)
        seed = jax.tree.map(jnp.zeros_like, state) if seed is None else seed
        before = _choose(at.begins, seed, state)
        after, y = cell(before, x)
        return _choose(at.real, after, before), y

    seeds = None if line is None else seeds
    state, y = jax.lax.scan(step, state, _swapped((inputs, line, seeds)))
    y = _swapped(y)
    if line is not None:
        y = jax.tree.map(lambda leaf: jnp.where(_spread(line.real, leaf), leaf, 0), y)
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
