"""Softmax attention within a window: the four implementations that Longformer's paper compares.

Beltagy et al. 2020, section 3.2 and appendix A. A query sees the keys up to `window` tokens away on
both sides. All give the same results; lengths are multiples of the window, and at least two
windows.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from train.runtime.local_hardware import local_hardware
from transformer import Mask, MaskPattern
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.reference import ScoreSpec, attend_reference

Array = jax.Array


def full(q: Array, k: Array, v: Array, window: int) -> Array:  # [B, T, N, H] each
    """Full attention: all scores [T, T], masked outside the window."""
    return attend_reference(q, k, v, _mask(window), _scoring(q))[0]


def fused(q: Array, k: Array, v: Array, window: int) -> Array:  # [B, T, N, H] each
    """Blockwise attention that skips tiles outside the window."""
    block = local_hardware().tile_size
    return attend_blockwise(q, k, v, _mask(window), _scoring(q), block_size=block).y


def loop(q: Array, k: Array, v: Array, window: int) -> Array:  # [B, T, N, H] each
    """Loop over diagonals: only the band [2 w + 1, B, T, N] is stored."""
    length = q.shape[1]
    offsets = jnp.arange(2 * window + 1)
    padding = [(0, 0), (window, window), (0, 0), (0, 0)]
    k, v = jnp.pad(k, padding), jnp.pad(v, padding)

    def shifted(x: Array, offset: Array) -> Array:  # [B, T, N, H] tokens offset - w away
        return jax.lax.dynamic_slice_in_dim(x, offset, length, axis=1)

    def diagonal(offset: Array) -> Array:  # [B, T, N]
        at = jnp.arange(length) + offset - window
        real = ((at >= 0) & (at < length))[None, :, None]
        scores = jnp.sum(q * shifted(k, offset), axis=-1) / math.sqrt(q.shape[-1])
        return jnp.where(real, scores, -jnp.inf)

    def add(y: Array, each: tuple[Array, Array]) -> tuple[Array, None]:
        offset, weights = each
        return y + weights[..., None] * shifted(v, offset), None

    weights = jax.nn.softmax(jax.lax.map(diagonal, offsets), axis=0)
    return jax.lax.scan(add, jnp.zeros_like(q), (offsets, weights))[0]


def chunked(q: Array, k: Array, v: Array, window: int) -> Array:  # [B, T, N, H] each
    """Overlapping chunks of 2 w tokens as matmuls: twice the scores needed."""
    here, there = slice(None, window), slice(window, None)
    pairs = [_overlapping(_blocks(x, window), 2) for x in (q, k)]  # [B, T / w - 1, 2 w, N, H]
    scores = jnp.einsum("BCTNH,BCSNH->BNCTS", *pairs) / math.sqrt(q.shape[-1])
    # For each block of w queries: the previous, own and next block of keys.
    none = [(0, 0)] * 5
    before, behind = list(none), list(none)
    before[2], behind[2] = (1, 0), (0, 1)
    own = jnp.concatenate([scores[..., here, here], scores[:, :, -1:, there, there]], axis=2)
    band = jnp.concatenate(
        [
            jnp.pad(scores[..., there, here], before, constant_values=-jnp.inf),
            own,
            jnp.pad(scores[..., here, there], behind, constant_values=-jnp.inf),
        ],
        axis=-1,
    )  # [B, N, T / w, w, 3 w]
    distance = jnp.arange(-window, 2 * window)[None, :] - jnp.arange(window)[:, None]
    near = (jnp.abs(distance) <= window)[None, None, None]
    weights = jax.nn.softmax(jnp.where(near, band, -jnp.inf), axis=-1)
    around = [(0, 0), (window, window), (0, 0), (0, 0)]
    values = _overlapping(_blocks(jnp.pad(v, around), window), 3)
    return jnp.einsum("BNCTS,BCSNH->BCTNH", weights, values).reshape(v.shape)


def _blocks(x: Array, size: int) -> Array:  # [B, T, N, H] -> [B, T / size, size, N, H]
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


def _overlapping(x: Array, count: int) -> Array:
    """Return overlapping chunks [B, C + 1 - count, count w, N, H] of blocks [B, C, w, N, H]."""
    chunks = x.shape[1] + 1 - count
    return jnp.concatenate([x[:, each : each + chunks] for each in range(count)], axis=2)


def _mask(window: int) -> Mask:
    return Mask(MaskPattern(window=window + 1))


def _scoring(q: Array) -> ScoreSpec:
    return ScoreSpec(1 / math.sqrt(q.shape[-1]))


FORMS: dict[str, Callable[..., Array]] = {
    "full": full,
    "loop": loop,
    "chunked": chunked,
    "fused": fused,
}
"""By name: (q, k, v, window) -> y."""
