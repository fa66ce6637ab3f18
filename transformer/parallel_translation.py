"""Decoding of models that write all words at once: a length, then one pass."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from transformer.decoding import PROMPT_LENGTH_MULTIPLE, Params, bucket_length
from transformer.nonautoregressive import NonAutoregressive, predict_lengths


def translate_nonautoregressive(
    model: NonAutoregressive,
    params: Params,
    sources: Sequence[Sequence[int] | np.ndarray],  # B of them, of any lengths
    *,
    stop: int,
    batch_size: int = 32,
) -> list[list[int]]:
    """The likeliest word at each position of a target of the likeliest length, up to `stop`.

    Sources are taken in order of length, `batch_size` at a time, and come back in their own order.
    Raises ValueError for a source that is empty or that the model cannot read.
    """
    rows = [np.asarray(source, np.int32) for source in sources]
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"source {number}: is empty; give it at least one token")
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
    found: list[list[int]] = [[] for _ in rows]
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        written = _batch(model, params, [rows[i] for i in group], batch_size)
        for i, words in zip(group, written, strict=True):
            ends = np.flatnonzero(words == stop)
            found[i] = words[: ends[0] if len(ends) else None].tolist()
    return found


def _batch(
    model: NonAutoregressive, params: Params, rows: list[np.ndarray], batch_size: int
) -> list[np.ndarray]:
    limit = model.config.max_length
    source = np.zeros(
        (batch_size, bucket_length(max(map(len, rows)), PROMPT_LENGTH_MULTIPLE, limit)), np.int32
    )
    lengths = np.ones(batch_size, np.int32)  # rows that are not there are one token 0
    for number, row in enumerate(rows):
        source[number, : len(row)] = row
        lengths[number] = len(row)
    targets = np.asarray(_lengths(params, source, lengths, model=model))
    targets = targets if limit is None else np.minimum(targets, limit)
    most = bucket_length(int(targets.max()), PROMPT_LENGTH_MULTIPLE, limit)
    words = np.asarray(_write(params, source, lengths, targets, model=model, length=most))
    return [words[number, : targets[number]] for number in range(len(rows))]


@functools.partial(jax.jit, static_argnames="model")
def _lengths(
    params: Params,
    source: jax.Array,  # [B, S]
    lengths: jax.Array,  # [B]
    *,
    model: NonAutoregressive,
) -> jax.Array:  # [B]
    segments = _there(lengths, source.shape[1])
    output = model.apply({"params": params}, source, None, source_segments=segments)
    assert output.logits is not None
    return predict_lengths(output.logits, lengths)


@functools.partial(jax.jit, static_argnames=("model", "length"))
def _write(
    params: Params,
    source: jax.Array,  # [B, S]
    lengths: jax.Array,  # [B]
    targets: jax.Array,  # [B]
    *,
    model: NonAutoregressive,
    length: int,
) -> jax.Array:  # [B, T]
    output = model.apply(
        {"params": params},
        source,
        jnp.zeros((len(source), length), jnp.int32),
        source_segments=_there(lengths, source.shape[1]),
        segments=_there(targets, length),
    )
    assert output.logits is not None
    return jnp.argmax(output.logits, axis=-1)


def _there(lengths: jax.Array, size: int) -> jax.Array:  # [B, size]
    """Segments of rows with one document."""
    return (jnp.arange(size)[None, :] < lengths[:, None]).astype(jnp.int32)
