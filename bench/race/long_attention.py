"""Longformer and BigBird against Hugging Face, and attention within a window in four ways."""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import cores
from bench.race.attention import costs_by_length, draw_costs, print_costs
from bench.race.harness import OURS, Contender, peer, print_machine, print_race, race
from train.runtime.local_hardware import local_hardware
from transformer import Mask, MaskPattern
from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.reference import ScoreSpec, attend_reference

# Against Hugging Face -----------------------------------------------------------------------------


def long_attention(torch_python: Path = Path(sys.executable)) -> None:
    """Race the mixers `longformer` and `bigbird` beside Hugging Face's modules, forward.

    Projections included, width 768, 12 heads. Of Longformer, with 256 keys on each side, the time
    of 4,096 tokens; of BigBird, in blocks of 64, how the memory grows with the length.

    Args:
      torch_python: The interpreter that has PyTorch and transformers.
    """
    print_machine()
    shape = {"width": 768, "heads": 12, "window": 256, "block": 64, "threads": cores()}

    def sides(mixer: str, length: int) -> list[Contender]:
        settings = {**shape, "mixer": mixer, "length": length}
        theirs = peer(torch_python, "long_attention")
        ours = Contender("ours", (*OURS, "long_attention"), settings)
        return [ours, Contender("Hugging Face", theirs, settings)]

    title = "longformer, T 4,096, D 768, 12 heads, window 256 on each side, float32, forward"
    print_race(title, sides("longformer", 4096), work=4096, rounds=5)
    lengths = (1024, 2048, 4096, 8192)
    records = [race(sides("bigbird", length), rounds=1, steps=1, warmup=1) for length in lengths]
    columns = ("", *(f"{length:,}" for length in lengths), "~ T^")
    table = Table(*columns, title="bigbird: MiB that a forward pass takes beside weights and input")
    for of_side in zip(*records, strict=True):
        taken = [record.peak_memory_bytes for record in of_side]
        exponent = np.log2(taken[-1] / taken[-2])  # between the two longest
        cells = (f"{each / 2**20:,.0f}" for each in taken)
        table.add_row(of_side[0].name, *cells, f"{exponent:.2f}")
    Console().print(table)


# Four forms of attention within a window ----------------------------------------------------------
#
# Beltagy et al. 2020, section 3.2 and appendix A. A query sees the keys up to `window` tokens away
# on both sides. All give the same results (tests/bench/test_long_attention.py); lengths are
# multiples of the window, and at least two windows.


def window_forms(
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384),
    figure: Path | None = Path("docs/figures/longformer.png"),
) -> None:
    """Draw figure 1 of Longformer's paper (Beltagy et al. 2020) from this code.

    All scores of full attention; a loop over the diagonals of the window (section 3.2's
    memory-efficient but slow form); overlapping chunks of two windows, as matrix products; and this
    library's tiles. 4 heads of 64, 256 keys on each side. Memory is what the compiler reserves for
    a forward pass besides arguments and results.

    Args:
      lengths: T.
      figure: Where it is written.
    """
    print_machine()

    def compiled(name: str, length: int) -> tuple[Any, Sequence[Any]]:
        heads = inputs(length, heads=4, width=64)
        form = functools.partial(FORMS[name], window=256)
        return jax.jit(form).lower(*heads).compile(), heads

    costs = costs_by_length(list(FORMS), lengths, compiled, rounds=5, patience=20.0)
    print_costs(costs, lengths)
    if figure:
        draw_costs(costs, "forward", figure)


Array = jax.Array


def inputs(length: int, heads: int, width: int) -> tuple[Array, Array, Array]:  # [1, T, N, H] each
    """Return queries, keys and values."""
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(3, 1, length, heads, width)).astype(np.float32)
    return jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)


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
    "full: all scores": full,
    "loop: one diagonal at a time": loop,
    "chunked: overlapping chunks of 2w": chunked,
    "fused: tiles, running softmax": fused,
}
"""By name: (q, k, v, window) -> y."""
