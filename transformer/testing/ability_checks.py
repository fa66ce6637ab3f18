"""One check for each ability that a mixer may declare."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from transformer.attention.masks import Mask, MaskPattern, dense_mask
from transformer.testing.mixer_under_test import BATCH_SIZE, Array, Trial, run_mixer

DEFAULT_LENGTHS = (1, 63, 129, 257)
"""Lengths next to the block sizes of the attention backends, and 1."""


def check_causal(trial: Trial) -> None:
    """Check that inputs after t do not change outputs up to t, bit for bit.

    The changed inputs are large, so that they also move a maximum or a bucket over all tokens. A
    gradient test would miss those.
    """
    length = trial.length
    x, other = trial.inputs(0), 100 * trial.inputs(1)
    y = trial(x).y
    for t in sorted({0, 1, length // 3, 63, 64, 65, length - 2} & set(range(length - 1))):
        changed = trial(np.where(_column(np.arange(length) > t), other, x)).y
        same = np.array_equal(changed[:, : t + 1], y[:, : t + 1])
        trial.require(same, "causal", f"outputs up to position {t} changed when later inputs did")
        # Not of the last position alone: a mixer may read only what is before a token.
        idle = np.array_equal(changed[:, t + 1 :], y[:, t + 1 :])
        trial.require(
            not idle or t == length - 2,
            "causal",
            f"outputs after position {t} do not depend on their inputs",
        )


def check_cached(trial: Trial) -> None:
    """Check that a prefill, a few tokens at once and single tokens equal one full pass."""
    x = trial.inputs(2)
    full = trial(x).y
    cache = trial.init_cache(trial.length + 2)
    layout = _layout(cache)
    start = 0
    for count in (trial.length - 6, 3, 1, 1, 1):
        tokens = slice(start, start + count)
        positions = np.arange(start, start + count)[None].repeat(BATCH_SIZE, 0)
        y, cache, _ = trial(x[:, tokens], cache=cache, positions=positions)
        same = _layout(cache) == layout
        trial.require(same, "cached", "the returned cache has other shapes than the given one")
        message = f"{count} tokens from position {start} differ from the full pass"
        trial.require_close(y, full[:, tokens], "cached", message)
        start += count
    _check_padded_prompts(trial, x, full)


def _check_padded_prompts(trial: Trial, x: Array, full: Array) -> None:
    """Check that tokens after a padded prefill of several lengths equal the full pass."""
    count = trial.length - 6
    lengths, rows = np.array([count, max(1, count // 2), 1]), np.arange(BATCH_SIZE)
    index = np.arange(count)[None]
    is_token = index < lengths[:, None]
    # Padding is large noise, not zeros: a mixer that reads it gives clearly other results.
    tokens = np.where(is_token[:, :, None], x[:, :count], 100 * trial.inputs(12, count))
    cache = trial.init_cache(trial.length + 2)
    cache = trial(tokens, cache=cache, positions=np.where(is_token, index, -1)).cache
    y = trial(x[rows, lengths][:, None], cache=cache, positions=lengths[:, None]).y
    message = "a token after a padded prompt differs from the full pass"
    trial.require_close(y[:, 0], full[rows, lengths], "cached", message)


def check_segments(trial: Trial) -> None:
    """Check that packed documents equal single ones, and that padding changes nothing."""
    x, other = trial.inputs(3), 100 * trial.inputs(4)
    segments, positions = pack_two_documents(trial.length)
    call = functools.partial(trial, segments=segments, positions=positions)
    y = call(x).y
    trial.require(np.isfinite(y).all(), "segments", "outputs are not finite")
    for document in (1, 2):
        own = (segments == document)[0]
        separate: dict[str, Any] = {}
        if trial.reads_memory:
            separate["memory"] = trial.memory[:, (trial.memory_segments == document)[0]]
        changed = call(np.where(_column(own), x, other)).y
        # Bit for bit: a weight that is tiny but not zero would pass any tolerance.
        same = np.array_equal(changed[:, own], y[:, own])
        trial.require(
            same, "segments", f"document {document} depends on another document or on padding"
        )
        if trial.abilities.any_length and not trial.mixer.config.depends_on_row_index:
            message = f"document {document} gives other results in a packed row than alone"
            expected = trial(x[:, own], **separate).y
            trial.require_close(y[:, own], expected, "segments", message)
    _check_gradient_of_padding(trial, x)


def _check_gradient_of_padding(trial: Trial, x: Array) -> None:
    segments, positions = pack_two_documents(trial.length)
    inputs = trial.mixer_inputs(trial.length, segments=segments, positions=positions)
    real = _column(segments[0] != 0).astype(np.float32)

    def total(x: Any) -> jax.Array:
        y = run_mixer(trial.mixer, trial.params, x, inputs).y
        return jnp.sum(jnp.square(y) * real)

    gradient = np.asarray(jax.jit(jax.grad(total))(x))
    trial.require(np.isfinite(gradient).all(), "segments", "gradients are not finite")
    trial.require(not np.any(gradient * (1 - real)), "segments", "padding has a gradient")


def check_cross(trial: Trial) -> None:
    """Check that the memory is read and that its padding changes nothing.

    In cross attention keys and values come from the memory only. A mixer that sets `reads_memory`
    uses its own input too.
    """
    check = _check_reads_memory if trial.reads_memory else _check_cross_attention
    check(trial)


def _check_cross_attention(trial: Trial) -> None:
    size = trial.length + 6 if trial.abilities.any_length else trial.length
    x, memory = trial.inputs(5), trial.inputs(6, size)
    call = functools.partial(trial, mask=Mask())
    y = call(x, memory=memory).y
    trial.require(y.shape == x.shape, "cross", f"the result is {y.shape} for inputs {x.shape}")
    others = np.where(_column(np.arange(trial.length) > 1), -x, x)
    same = np.array_equal(call(others, memory=memory).y[:, :2], y[:, :2])
    trial.require(same, "cross", "a query's result depends on other queries")
    cut = np.array([size, size - 3, 2])
    padding = np.arange(size)[None, :, None] >= cut[:, None, None]
    other = np.where(padding, 100 * trial.inputs(7, size), memory)
    changed = np.any(call(x, memory=other).y != y, axis=(1, 2))
    trial.require(
        (changed == [False, True, True]).all(),
        "cross",
        "the result does not depend on the memory, or on too much of it",
    )
    if trial.abilities.segments:
        mask = Mask(key_lengths=cast(Any, cut))
        before, after = (trial(x, mask=mask, memory=each).y for each in (memory, other))
        trial.require(
            np.array_equal(before, after), "cross", "padding of the memory changes the result"
        )
    if trial.abilities.cached:
        _check_memory_cache(trial, x, memory)


def _check_reads_memory(trial: Trial) -> None:
    """Check a mixer that reads a memory in addition to its own input."""
    x, memory = trial.inputs(5), trial.memory
    y = trial(x).y
    message = "the result does not depend on the memory, or on too much of it"
    trial.require(np.any(trial(x, memory=-memory).y != y, axis=(1, 2)).all(), "cross", message)
    ones = cast(Any, np.ones((1, trial.length), int))
    segments = cast(Any, (trial.memory_segments != 0).astype(int))
    mask = Mask(MaskPattern(ordered=False), segments=ones, key_segments=segments)
    other = np.where(segments[:, :, None] == 0, 100 * trial.inputs(7, memory.shape[1]), memory)
    before, after = (trial(x, mask=mask, memory=each).y for each in (memory, other))
    trial.require(
        np.array_equal(before, after), "cross", "padding of the memory changes the result"
    )
    trial.require(np.any(before != y), "cross", "the mask of the memory has no effect")
    if trial.abilities.cached:
        _check_memory_cache(trial, x, memory)


def _check_memory_cache(trial: Trial, x: Array, memory: Array) -> None:
    """Check that queries after the first call need only the cache of the memory."""
    full = trial(x, memory=memory, mask=Mask()).y
    cache = trial.mixer.init_memory_cache(*memory.shape[:2])
    layout, half = _layout(cache), trial.length // 2
    for tokens, memory_or_none in ((slice(half), memory), (slice(half, None), None)):
        positions = np.arange(trial.length)[None, tokens]
        call = functools.partial(trial, mask=Mask(), positions=positions)
        y, cache, _ = call(x[:, tokens], memory=memory_or_none, cache=cache)
        same = _layout(cache) == layout
        trial.require(
            same, "cross", "the returned cache of the memory has other shapes than the given one"
        )
        message = "results from the cached memory differ from those of the memory"
        trial.require_close(y, full[:, tokens], "cross", message)


def check_any_length(trial: Trial) -> None:
    """Check that tokens give the same results alone and at the start of a longer input."""
    longest = max(trial.lengths)
    x = trial.inputs(8, longest)
    for length in trial.lengths:
        y = trial(x[:, :length]).y
        fine = y.shape == x[:, :length].shape and np.isfinite(y).all()
        trial.require(fine, "any_length", f"{length} tokens do not give as many finite results")
        segments = None if trial.abilities.causal else (np.arange(longest) < length)[None] * 1
        if trial.abilities.causal or trial.abilities.segments:
            expected = trial(x, segments=segments).y[:, :length]
            message = f"{length} tokens give other results than at the start of {longest} tokens"
            trial.require_close(y, expected, "any_length", message)


def check_weights(trial: Trial) -> None:
    """Check that weights [B, N, T, S] sum to 1, and that hidden keys have weight 0."""
    segments, positions = pack_two_documents(trial.length)
    packs = trial.abilities.segments
    options: dict[str, Any] = dict(segments=segments, positions=positions) if packs else {}
    x, length = trial.inputs(9), trial.length
    y, _, aux = trial(x, outputs=frozenset({"weights"}), **options)
    trial.require("weights" in aux, "weights", "are not in aux though they were requested")
    weights = np.asarray(aux["weights"])
    size = trial.memory.shape[1] if trial.reads_memory else length
    fine = weights.ndim == 4 and (*weights.shape[:1], *weights.shape[2:]) == (
        BATCH_SIZE,
        length,
        size,
    )
    trial.require(fine, "weights", f"their shape {weights.shape} is not [B, N, T, S]")
    visible = np.asarray(dense_mask(trial.mixer_inputs(length, **options).mask, length, size))[
        :, None
    ]
    hidden = np.where(visible, 0, weights)
    trial.require(not hidden.any(), "weights", "keys that the mask hides have a weight")
    sums = np.broadcast_to(visible.any(-1), weights.shape[:3]).astype(np.float32)
    trial.require_close(weights.sum(-1), sums, "weights", "rows do not sum to 1")
    trial.require_close(trial(x, **options).y, y, "weights", "asking for them changes the result")


def pack_two_documents(length: int) -> tuple[Array, Array]:  # [1, T], [1, T]
    """Return segments and positions of a row with two documents and padding after them."""
    sizes = (length // 3, length // 2, length - length // 3 - length // 2)
    segments = np.repeat([1, 2, 0], sizes)[None]
    positions = np.concatenate([np.arange(size) for size in sizes])[None]
    return segments, positions


def _column(flags: Array) -> Array:  # [T] -> [1, T, 1]
    return flags[None, :, None]


def _layout(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
