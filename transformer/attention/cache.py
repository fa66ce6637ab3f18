"""Caches of incremental decoding: plain pytrees, passed in and returned.

A cache is made by the class method `empty(...)`, never by hand. There are two kinds.

**Tokens**: values of previous tokens, each written once and read by later ones, as in this file and
beside the mixers that keep others.

- `empty(..., dtype)`: `dtype` is the storage dtype, `Precision.cache_dtype`, the same for all
  layers of a model. A number is rounded once, so the error does not grow with the number of tokens.
- `append(...)` returns the cache with T more tokens. It casts to the storage dtype.
- `read(dtype)` returns the tokens, cast to the dtype of the computation.

**Recurrent states**: `empty(...)` is the state before the first token; the recurrence takes a state
and returns the next one, so there is nothing to append or read. `Precision.cache` does not apply: a
state is rewritten at every token, so each rounding would be carried into all later tokens, and its
size is independent of their number, so little would be saved. A state has the dtypes of its
recurrence: the compute dtype, and float32 for sums over all tokens (LSTM cells, sums of features),
whose new terms a 16-bit sum would soon round away.

Every leaf has the batch as its first axis, so that rows move between batches. Slots are filled from
the first one on, so that a cache begins a longer one (`lengthen_cache`).

Positions are counted from 0 in each example. Callers mark padding with -1; `RollingCache`, which
stores positions, marks padding and empty slots with `ABSENT_POSITION`. A cache does not store
lengths: the position of a query says how many tokens precede it. `MemoryCache` holds an encoder's
output, which arrives whole: its `append` takes no positions and replaces the content.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Shaped

from transformer.attention.masks import Mask
from transformer.validation import may_be_below

ABSENT_POSITION = -(2**30)
"""Position of an empty slot: before the first token, and farther away than any window."""


def lengthen_cache(cache: Any, longer: Any) -> Any:
    """Return `longer`, an empty cache from the same `init_cache`, with the tokens of `cache`."""

    def begin(empty: jax.Array, leaf: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(empty, leaf, (0,) * leaf.ndim)

    return jax.tree.map(begin, longer, cache)


def scatter_tokens(
    y: Shaped[Array, "B T ..."],
    updates: Shaped[Array, "B n ..."],
    index: Int[Array, "#B n"],  # T: nowhere
) -> Shaped[Array, "B T ..."]:
    """Return `y` with the tokens at `index` replaced by `updates`."""
    places = jnp.broadcast_to(index, updates.shape[:2])
    # mode="drop" skips index T.
    return y.at[jnp.arange(y.shape[0])[:, None], places].set(updates, mode="drop")


def write_at_positions(
    slots: Shaped[Array, "B *heads S H"],
    tokens: Shaped[Array, "B *heads T H"],
    positions: Int[Array, "#B T"],  # consecutive in each row
) -> Shaped[Array, "B *heads S H"]:
    """Return the slots of a cache, one for each position, with T more tokens.

    Raises:
      ValueError: Positions that are not traced lie beyond the slots.
    """
    length, size = tokens.shape[-2], slots.shape[-2]
    # `dynamic_update_slice` would move the tokens back, onto those before them.
    first = jnp.maximum(positions[:, 0], 0)  # -1 in a row of padding
    if not may_be_below(first, size - length + 1):
        raise ValueError(
            f"positions: {length} tokens from position {first.max()} are beyond the cache of "
            f"{size}; give init_cache a larger length"
        )

    def write(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        index: tuple[Any, ...] = (*(0,) * (row.ndim - 2), start, 0)
        return jax.lax.dynamic_update_slice(row, new.astype(row.dtype), index)

    # One slice for each row: positions are consecutive, and examples stand at different ones.
    # A row of padding starts at -1, which counts from the end: it is written to the last slots,
    # which its causal queries never see before their own tokens overwrite them.
    start = jnp.broadcast_to(positions[:, 0], len(tokens))
    return jax.vmap(write)(slots, tokens, start)


class CachedTokens(NamedTuple):
    """Contents of a cache, as attention reads them."""

    keys: Float[Array, "B S K H"]
    values: Float[Array, "B S K Hv"]
    positions: Int[Array, "#B S"]


class KVCache(struct.PyTreeNode):
    """Keys and values of all tokens of one layer.

    Slot s holds the token at position s, so examples of different lengths share one cache. Slots
    after an example's last token hold zeros or padding. Their positions are greater than that of
    every query, so a causal mask hides them until they are overwritten.

    Heads before tokens: the products of attention have them as batch axes. In the other order XLA's
    CPU compiler makes a transposed copy of all keys and values for every token.
    """

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S Hv"]

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        length: int,  # S
        num_kv_heads: int,  # K
        head_dim: int,  # H
        dtype: Any,
        value_head_dim: int | None = None,  # None: H
    ) -> "KVCache":
        """Return a cache with room for `length` tokens of each example."""
        shape = (batch_size, num_kv_heads, length)
        keys = jnp.zeros((*shape, head_dim), dtype)
        return cls(keys, jnp.zeros((*shape, value_head_dim or head_dim), dtype))

    def append(
        self,
        keys: Float[Array, "B T K H"],
        values: Float[Array, "B T K Hv"],
        positions: Int[Array, "#B T"],  # consecutive in each row
    ) -> "KVCache":
        """Return the cache with T more tokens, written at their positions.

        Raises:
          ValueError: Positions that are not traced lie beyond the cache.
        """
        return KVCache(
            keys=write_at_positions(self.keys, keys.swapaxes(1, 2), positions),
            values=write_at_positions(self.values, values.swapaxes(1, 2), positions),
        )

    def read(self, dtype: Any) -> CachedTokens:
        """Return all S slots in `dtype`."""
        keys, values = (x.astype(dtype).swapaxes(1, 2) for x in (self.keys, self.values))
        return CachedTokens(keys, values, self.positions)

    @property
    def positions(self) -> Int[Array, "1 S"]:
        """Position of each slot, the same in all examples."""
        return jnp.arange(self.keys.shape[2])[None, :]


class MemoryCache(struct.PyTreeNode):
    """Keys and values of an encoder's output, projected once, for one cross attention."""

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S Hv"]

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        length: int,  # S
        num_kv_heads: int,  # K
        head_dim: int,  # H
        dtype: Any,
        value_head_dim: int | None = None,  # None: H
    ) -> "MemoryCache":
        """Return a cache for a memory of `length` tokens."""
        cache = KVCache.empty(batch_size, length, num_kv_heads, head_dim, dtype, value_head_dim)
        return cls(cache.keys, cache.values)

    def append(
        self,
        keys: Float[Array, "B S K H"],
        values: Float[Array, "B S K Hv"],
    ) -> "MemoryCache":
        """Return the cache filled with a memory, which replaces all its slots.

        Raises:
          ValueError: the memory has another shape than the cache.
        """
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        if keys.shape != self.keys.shape:
            raise ValueError(
                f"memory of {keys.shape[0]} x {keys.shape[2]} tokens: its cache is for "
                f"{self.keys.shape[0]} x {self.keys.shape[2]}; call init_memory_cache with the "
                "size of the memory"
            )
        return MemoryCache(keys.astype(self.keys.dtype), values.astype(self.values.dtype))

    def read(self, dtype: Any) -> CachedTokens:
        """Return the memory's keys and values in `dtype`."""
        positions = jnp.arange(self.keys.shape[2])[None, :]
        keys, values = (x.astype(dtype).swapaxes(1, 2) for x in (self.keys, self.values))
        return CachedTokens(keys, values, positions)


class RollingCache(struct.PyTreeNode):
    """Keys and values of the last R tokens, for sliding windows.

    Slot p mod R holds the token at position p. The size is constant however many tokens follow.
    """

    keys: Float[Array, "B R K H"]
    values: Float[Array, "B R K H"]
    positions: Int[Array, "B R"]  # ABSENT_POSITION in empty slots

    @classmethod
    def empty(
        cls,
        batch_size: int,  # B
        num_slots: int,  # R
        num_kv_heads: int,  # K
        head_dim: int,  # H
        dtype: Any,
    ) -> "RollingCache":
        """Return a cache with room for the last `num_slots` tokens."""
        zeros = jnp.zeros((batch_size, num_slots, num_kv_heads, head_dim), dtype)
        return cls(zeros, zeros, jnp.full((batch_size, num_slots), ABSENT_POSITION))

    def append(
        self,
        keys: Float[Array, "B T K H"],
        values: Float[Array, "B T K H"],
        positions: Int[Array, "B T"],  # ABSENT_POSITION for padding
    ) -> "RollingCache":
        """Return the cache with the last R of its tokens and T more."""
        num_slots = self.positions.shape[1]
        # Two tokens must not be scattered into one slot: the order of such writes is undefined. So
        # all but the last R new tokens are dropped, by an index outside the array.
        recent = positions > jnp.max(positions, axis=1, keepdims=True) - num_slots
        slots = jnp.where(recent & (positions >= 0), positions % num_slots, num_slots)
        return RollingCache(
            scatter_tokens(self.keys, keys.astype(self.keys.dtype), slots),
            scatter_tokens(self.values, values.astype(self.values.dtype), slots),
            scatter_tokens(self.positions, positions, slots),
        )

    def read(self, dtype: Any) -> CachedTokens:
        """Return all R slots in `dtype`, in the order of the slots."""
        return CachedTokens(self.keys.astype(dtype), self.values.astype(dtype), self.positions)

    def sorted_by_position(self) -> "RollingCache":
        """Return the tokens in the order of their positions, empty slots first.

        The result is for reading: its slots no longer follow from positions.
        """
        order = jnp.argsort(self.positions, axis=1)
        rows = order[:, :, None, None]
        return RollingCache(
            keys=jnp.take_along_axis(self.keys, rows, axis=1),
            values=jnp.take_along_axis(self.values, rows, axis=1),
            positions=jnp.take_along_axis(self.positions, order, axis=1),
        )


class WindowInputs(NamedTuple):
    """Inputs of attention over the tokens of a RollingCache and T new ones."""

    q: Float[Array, "B P_plus_T N H"]  # the first P queries are padding
    k: Float[Array, "B R_plus_T K H"]
    v: Float[Array, "B R_plus_T K H"]
    mask: Mask  # of these queries over these keys
    key_positions: Int[Array, "B R_plus_T"]
    num_padding_queries: int  # P: R or 0


def prepend_cached_keys(
    cache: RollingCache,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    mask: Mask,  # of self-attention over the new tokens
    positions: Int[Array, "B T"],  # ABSENT_POSITION for padding
) -> WindowInputs:
    """Return the inputs of attention of new queries over cached and new keys.

    A few new tokens attend to all R + T keys, in any order. A prefill of more than R tokens sorts
    the cached tokens and pads the queries, so that queries and keys are the same ordered tokens:
    then a window follows from the index, and blockwise attention never visits what it hides. The
    R padding queries cost less than that saves.
    """
    num_slots, pattern = cache.positions.shape[1], mask.pattern
    window_only = (
        pattern.ordered
        and not pattern.prefix
        and mask.segments is None
        and not mask.has_extra_masks
    )
    if window_only and q.shape[1] > num_slots:
        # Queries and keys become the same R + T ordered tokens; the results of the first R are cut
        # off.
        k, v, key_positions = _concatenate(cache.sorted_by_position(), k, v, positions)
        q = jnp.pad(q, [(0, 0), (num_slots, 0), (0, 0), (0, 0)])
        segments = (key_positions != ABSENT_POSITION).astype(jnp.int32)
        mask = mask.replace(positions=key_positions, segments=segments)
        return WindowInputs(q, k, v, mask, key_positions, num_slots)
    k, v, key_positions = _concatenate(cache, k, v, positions)
    # Empty slots are farther away than any window, so the mask hides them without a length.
    mask = mask.with_keys(key_positions, keys_include_queries=True)
    return WindowInputs(q, k, v, mask, key_positions, 0)


def _concatenate(
    cache: RollingCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
) -> CachedTokens:  # of R + T tokens
    """Return the cached tokens followed by the new ones."""
    cached = cache.read(k.dtype)
    return CachedTokens(
        keys=jnp.concatenate([cached.keys, k], axis=1),
        values=jnp.concatenate([cached.values, v], axis=1),
        positions=jnp.concatenate([cached.positions, positions], axis=1),
    )


def mark_padding(
    positions: Int[Array, "#B T"],  # -1: padding
    batch_size: int,  # B
) -> Int[Array, "B T"]:
    """Return positions for a RollingCache, with ABSENT_POSITION for padding."""
    marked = jnp.where(positions < 0, ABSENT_POSITION, positions)
    return jnp.broadcast_to(marked, (batch_size, positions.shape[1]))
