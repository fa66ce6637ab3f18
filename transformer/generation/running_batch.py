"""Continuous batching: rows join a batch while it is decoded, and leave it (Yu et al. 2022, Orca).

A row's prompt is read by itself, or with others of about its length, and its cache is written into
the batch between two calls of the decoding loop. The loop is that of `generate`, in which each row
has a position of its own, so a row gets the tokens that `generate` gives its prompt alone, up to
rounding in batches of another size. That holds for every model that `generate` takes.

The batch has one of a few sizes, its cache and the prompts have a power of two of tokens, as small
as the rows allow: few programs serve every load, and no step computes much more than is asked for.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped, UInt32

from transformer.attention.cache import lengthen_cache
from transformer.generation.batches import PROMPT_LENGTH_MULTIPLE, pad_right
from transformer.generation.generate import (
    NO_TOKEN,
    TOKENS_PER_CALL,
    DecodingState,
    continue_rows,
    decodes_from_cache,
    start_rows,
)
from transformer.generation.sampling import ANCESTRAL_SAMPLING, SamplingConfig, SamplingValues
from transformer.models.language_model import LanguageModel
from transformer.models.model import max_cache_length
from transformer.models.unstacked import Params, unstack_where_memory_allows

MIN_CACHE_LENGTH = 256
"""Smallest length of the cache, in tokens."""

PROMPT_GROUPS = (16, 4)
"""Numbers of short prompts that are read together. A longer prompt alone fills the processor."""


@dataclasses.dataclass(eq=False, kw_only=True)
class BatchRow:
    """Prompt and settings of one row, and what was generated so far."""

    prompt: Int[np.ndarray, "t"]
    max_new_tokens: int
    sampling: SamplingConfig = ANCESTRAL_SAMPLING
    seed: UInt32[np.ndarray, "3"]  # of `seed_words`
    tokens: list[int] = dataclasses.field(default_factory=list)
    """New tokens, without the stop token."""
    finished: bool = False
    stop_token: int | None = None
    """The token that ended the row, if one did."""

    @property
    def stopped(self) -> bool:
        """True if a stop token was generated."""
        return self.finished and len(self.tokens) < self.max_new_tokens


class RunningBatch:
    """Rows that are decoded together.

    Args:
      model: The model.
      params: Its parameters. `unstack_for_decoding(params)` saves a copy of each layer at every
        token.
      sizes: Numbers of rows for which there are programs, in ascending order. May be set later.
      stop_tokens: Tokens that end a row, from `stop_token_array`.
    """

    def __init__(
        self,
        model: LanguageModel,
        params: Params,
        sizes: tuple[int, ...],
        stop_tokens: Int[np.ndarray, "E"],
    ):
        self._model, self._params = model, unstack_where_memory_allows(params)
        self.sizes, self._stop_tokens = sizes, stop_tokens
        self._limit = max_cache_length(model.config)
        self._state: DecodingState | None = None
        self._empty_row: DecodingState | None = None
        self._rows: list[BatchRow | None] = []
        self._cache_length = 0

    @property
    def rows(self) -> list[BatchRow]:
        """The rows that are not finished."""
        return [row for row in self._rows if row is not None]

    @property
    def num_free(self) -> int:
        """Number of rows that may join."""
        return self.sizes[-1] - len(self.rows)

    def add(self, rows: Sequence[BatchRow]) -> None:
        """Read the prompts of at most `num_free` rows, which `check_prompts` accepts.

        Each row gets its first token, which may be its last one.
        """
        by_length: dict[int, list[BatchRow]] = {}
        for row in rows:
            by_length.setdefault(self._padded_length(row), []).append(row)
        self._make_room(len(rows), max(by_length))
        for length, group in by_length.items():
            sizes = [size for size in PROMPT_GROUPS if size in self.sizes]
            while group:
                fitting = [size for size in sizes if size <= len(group)]
                size = max(fitting, default=1) if length == PROMPT_LENGTH_MULTIPLE else 1
                self._start(group[:size], length)
                group = group[size:]

    def advance(self, max_tokens: int) -> None:
        """Add up to `max_tokens` tokens to each row; fewer if that ends one."""
        rows = self.rows
        if not rows:
            return
        self._make_room(0, max(self._length_after(row, max_tokens) for row in rows))
        self._state, new = continue_rows(
            self._params,
            self._state,
            self._stop_tokens,
            np.int32(min(max_tokens, TOKENS_PER_CALL)),
            np.int32(len(rows)),
            model=self._model,
        )
        self._receive(self._rows, np.asarray(new), self._state)

    def remove(self, row: BatchRow) -> None:
        """Remove a row before its end."""
        slot = self._rows.index(row)
        self._rows[slot] = None
        assert self._state is not None
        remaining = np.array(self._state.remaining)
        remaining[slot] = 0
        self._state = self._state.replace(remaining=jnp.asarray(remaining))

    def clear(self) -> None:
        """Remove all rows, and release the memory of the cache."""
        self._state, self._empty_row, self._rows, self._cache_length = None, None, [], 0

    def compile(self, size: int, prompt_length: int) -> None:
        """Compile the programs of a size, by decoding as many rows. Another thread may do so."""
        no_stops = np.full_like(self._stop_tokens, NO_TOKEN)  # which might end all rows at once
        trial = RunningBatch(self._model, self._params, (size,), no_stops)
        prompt, seed = np.zeros(prompt_length, np.int32), np.zeros(3, np.uint32)
        trial.add([BatchRow(prompt=prompt, max_new_tokens=2, seed=seed) for _ in range(size)])
        trial.advance(1)
        self.sizes = tuple(sorted({*self.sizes, size}))

    def _padded_length(self, row: BatchRow) -> int:
        return self._power_of_two(len(row.prompt), PROMPT_LENGTH_MULTIPLE)

    def _length_after(self, row: BatchRow, max_tokens: int) -> int:
        """Return the number of tokens in the cache after `max_tokens` more."""
        return len(row.prompt) + min(len(row.tokens) + max_tokens, row.max_new_tokens)

    def _make_room(self, num_new: int, length: int) -> None:
        """Let the batch have room for more rows and for `length` tokens in each."""
        rows = self.rows
        num_slots = min(size for size in self.sizes if size >= len(rows) + num_new)
        cache_length = self._power_of_two(length, MIN_CACHE_LENGTH)
        if rows:
            cache_length = max(cache_length, self._cache_length)
            if num_slots < len(self._rows) <= 2 * num_slots:  # others may come soon
                num_slots = len(self._rows)
        if (num_slots, cache_length) == (len(self._rows), self._cache_length):
            return
        if cache_length != self._cache_length:
            self._empty_row = _empty_row(self._model, cache_length)
        sources = np.full(num_slots, -1, np.int32)
        sources[: len(rows)] = [slot for slot, row in enumerate(self._rows) if row]
        old = self._state if rows else self._empty_row
        self._state = jax.tree.map(lambda *leaves: _take(*leaves, sources), self._empty_row, old)
        self._rows = rows + [None] * (num_slots - len(rows))
        self._cache_length = cache_length

    def _power_of_two(self, length: int, minimum: int) -> int:
        """Return the smallest power of two from two lengths on, at most the model's positions."""
        power = max(minimum, 1 << (length - 1).bit_length())
        return power if self._limit is None else min(power, self._limit)

    def _start(self, group: Sequence[BatchRow], length: int) -> None:
        """Read prompts of one padded length and write them into free slots."""
        tokens, lengths = pad_right([row.prompt for row in group], len(group), self._limit)
        tokens = np.pad(tokens, ((0, 0), (0, length - tokens.shape[1])))
        values = [row.sampling.values(1) for row in group]
        started, new = start_rows(
            self._params,
            tokens,
            lengths,
            np.array([row.max_new_tokens for row in group], np.int32),
            np.stack([row.seed for row in group]),
            self._stop_tokens,
            SamplingValues(*(np.concatenate(column) for column in zip(*values, strict=True))),
            model=self._model,
            cache_length=length,
        )
        slots = [slot for slot, row in enumerate(self._rows) if row is None][: len(group)]
        slots_array = np.array(slots, np.int32)
        self._state = jax.tree.map(
            lambda *leaves: _put(*leaves, slots_array), self._state, self._empty_row, started
        )
        for slot, row in zip(slots, group, strict=True):
            self._rows[slot] = row
        self._receive(group, np.asarray(new), started)

    def _receive(
        self,
        rows: Sequence[BatchRow | None],
        new: Int[np.ndarray, "B n"],
        state: DecodingState,
    ) -> None:
        """Give rows their new tokens, and let those that have ended leave."""
        remaining, newest = np.asarray(state.remaining), np.asarray(state.tokens)
        for row, tokens, left, last in zip(rows, new, remaining, newest, strict=True):
            if row is not None:
                row.tokens += tokens[tokens != NO_TOKEN].tolist()
                row.finished = not left
                if row.stopped:
                    row.stop_token = int(last)
        self._rows = [None if row is None or row.finished else row for row in self._rows]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _empty_row(model: LanguageModel, cache_length: int) -> DecodingState:
    """Return the state of one row that is finished."""
    zero = jnp.zeros(1, jnp.int32)
    cache: Any = jnp.zeros((1, cache_length), jnp.int32)
    if decodes_from_cache(model):  # else it is the text: see `decode_step`
        cache = model.init_cache(1, cache_length)
    keys, number = jax.random.key(0)[None], zero.astype(jnp.float32)
    return DecodingState(cache, zero, zero, zero, keys, SamplingValues(number, zero, number))


# Leaf by leaf: most have the same shape, and a program for it compiles in a moment. The number of
# rows that come, and that of the rows of the batch before and after, make many combinations.


@jax.jit
def _take(
    empty: Shaped[Array, "1 ..."],
    old: Shaped[Array, "A ..."],  # of a cache that is not longer
    sources: Int[Array, "B"],  # rows of `old`; -1: `empty`
) -> Shaped[Array, "B ..."]:
    """Return a leaf of a batch with rows of another."""
    rows = _lengthen(empty, old[sources])
    return jnp.where(jnp.expand_dims(sources >= 0, range(1, rows.ndim)), rows, empty)


@functools.partial(jax.jit, donate_argnums=0)
def _put(
    leaf: Shaped[Array, "B ..."],
    empty: Shaped[Array, "1 ..."],
    new: Shaped[Array, "n ..."],  # of a cache that is not longer
    slots: Int[Array, "n"],
) -> Shaped[Array, "B ..."]:
    """Return a leaf of a batch with new rows in some slots."""
    return leaf.at[slots].set(_lengthen(empty, new))


def _lengthen(empty: Shaped[Array, "1 ..."], rows: Shaped[Array, "n ..."]) -> jax.Array:
    longer: jax.Array = lengthen_cache(rows, jnp.broadcast_to(empty, (len(rows), *empty.shape[1:])))
    return longer
