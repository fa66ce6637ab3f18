"""Masks as data: a static description, and the arrays that it speaks of.

A flash kernel never builds [T, S] booleans; it reads the description. `dense` builds them, as the
oracle of every kernel and for the plain form of attention.

Which document each token belongs to, for mixers that compare no queries with keys.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct


@dataclasses.dataclass(frozen=True)
class MaskPattern:
    """What of a mask is known when the program is compiled. Hashable."""

    causal: bool = False
    """A query sees keys at its own position and before."""
    window: int = 0
    """A query sees keys less than `window` (times `dilation`) positions away; 0: all."""
    dilation: int = 1
    """Of those in the window, only keys at distances that are multiples of this."""
    prefix: bool = False
    """Keys at positions below `Mask.prefix` are seen by all, causal or not."""
    ordered: bool = True
    """Within a segment positions grow with the index, so a causal mask is triangular in the index.
    False once tokens were reordered (ring attention): then only positions tell."""

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window {self.window}: is negative; give 0 for none, or more")
        if self.dilation < 1:
            raise ValueError(f"dilation {self.dilation}: is less than 1; give 1 for none, or more")


class Mask(struct.PyTreeNode):
    """Which key each query sees. B may be 1 in any array: then it holds for every example.

    Key arrays that are None are those of the queries (self attention).
    """

    pattern: MaskPattern = struct.field(pytree_node=False, default=MaskPattern())
    positions: jax.Array | None = None  # [B, T] of the queries
    key_positions: jax.Array | None = None  # [B, S]
    segments: jax.Array | None = None  # [B, T] document of each query; 0 is padding
    key_segments: jax.Array | None = None  # [B, S]
    key_lengths: jax.Array | None = None  # [B] number of keys that are there
    prefix_lengths: jax.Array | None = None  # [B]
    global_positions: jax.Array | None = (
        None  # [B, n] positions seen by all and seeing all; -1: none
    )
    allowed: jax.Array | None = None  # [B, T, S] booleans: False hides the key
    keys_include_queries: bool = struct.field(pytree_node=False, default=False)
    """Whether the keys at `key_positions` are those of the queries and others, as in a cache: so
    that a query sees itself at least."""
    single_document: bool = struct.field(pytree_node=False, default=False)
    """Whether `segments` tell of padding alone: it is known, when compiled, that no row is a pack.
    They hide the same keys as ever; who cannot keep documents apart need not refuse them."""

    def with_keys(
        self,
        key_positions: jax.Array,  # [B, S]
        key_segments: jax.Array | None = None,  # [B, S]
        *,
        keys_include_queries: bool = False,
    ) -> "Mask":
        """The same queries looking at other keys, such as those of a cache."""
        return self.replace(
            key_positions=key_positions,
            key_segments=key_segments,
            keys_include_queries=keys_include_queries,
        )

    def causal_block(self, start: int, end: int, length: int) -> "Mask":
        """Queries start to end over keys 0 to end, of self attention over `length` tokens."""
        positions = _or_arange(self.positions, length)
        cut = self.replace(
            positions=positions[:, start:end],
            key_positions=positions[:, :end],
            keys_include_queries=True,
        )
        if self.allowed is not None:
            cut = cut.replace(allowed=self.allowed[:, start:end, :end])
        if self.segments is None:
            return cut
        return cut.replace(
            segments=self.segments[:, start:end], key_segments=self.segments[:, :end]
        )

    def resolved_positions(
        self,
        num_queries: int,  # T
        num_keys: int,  # S
    ) -> tuple[jax.Array, jax.Array]:  # [B or 1, T], [B or 1, S]
        """Positions of queries and keys. Of keys that have none, the first is at 0."""
        own = self.key_positions is None and num_queries == num_keys
        theirs = self.positions if own else self.key_positions
        return _or_arange(self.positions, num_queries), _or_arange(theirs, num_keys)

    @property
    def has_extra_masks(self) -> bool:
        """Whether arrays other than segments hide keys, or show some, beside the pattern."""
        given = (self.key_lengths, self.prefix_lengths, self.global_positions, self.allowed)
        return any(array is not None for array in given)

    def may_have_empty_rows(
        self,
        num_queries: int,  # T
        num_keys: int,  # S
    ) -> bool:
        """Whether some query may see nothing; known when compiled."""
        if any(array is not None for array in (self.segments, self.key_lengths, self.allowed)):
            return True
        sees_itself = self.keys_include_queries or (
            self.key_positions is None and num_queries == num_keys
        )
        return (self.pattern.causal or self.pattern.window > 0) and not sees_itself


def dense_mask(
    mask: Mask,
    num_queries: int,  # T
    num_keys: int,  # S
) -> jax.Array:  # [B or 1, T, S] booleans
    """Any mask as booleans, True where the query sees the key."""
    pattern = mask.pattern
    query_places, key_places = mask.resolved_positions(num_queries, num_keys)
    q, k = query_places[:, :, None], key_places[:, None, :]
    seen = jnp.ones(jnp.broadcast_shapes(q.shape, k.shape), bool)
    if pattern.causal:
        seen &= k <= q
    if pattern.window:
        distance = jnp.abs(q - k)
        seen &= (distance < pattern.window * pattern.dilation) & (distance % pattern.dilation == 0)
    if pattern.prefix and mask.prefix_lengths is not None:
        seen |= k < mask.prefix_lengths[:, None, None]
    if mask.global_positions is not None:
        listed = mask.global_positions[:, None, :]
        is_global = jnp.any(k.swapaxes(1, 2) == listed, axis=-1)[:, None, :]
        from_global = jnp.any(q == listed, axis=-1)[:, :, None]
        ahead = (k > q) if pattern.causal else jnp.zeros_like(seen)
        seen |= (is_global | from_global) & ~ahead
    if mask.segments is not None:
        theirs = mask.segments if mask.key_segments is None else mask.key_segments
        same = mask.segments[:, :, None] == theirs[:, None, :]
        seen = seen & same & (theirs != 0)[:, None, :]
    if mask.key_lengths is not None:
        seen &= jnp.arange(num_keys)[None, None, :] < mask.key_lengths[:, None, None]
    if mask.allowed is not None:
        seen = seen & mask.allowed
    return seen


def _or_arange(positions: jax.Array | None, length: int) -> jax.Array:  # [B or 1, length]
    return jnp.arange(length)[None, :] if positions is None else positions


def token_segments(
    mask: Mask,
    length: int,  # T
) -> jax.Array | None:  # [B or 1, T]
    """The segments of a row, 0 also where `lengths` says that there is nothing.

    None: one document, and no padding.
    """
    if mask.key_lengths is None:
        return mask.segments
    there = jnp.arange(length)[None, :] < mask.key_lengths[:, None]
    return jnp.where(there, 1 if mask.segments is None else mask.segments, 0)


def previous_segments(
    segments: jax.Array,  # [B, T]
) -> jax.Array:  # [B, T]
    """The document of the last token before each that is no padding; 0 if there is none."""
    index = jnp.arange(segments.shape[1])[None, :]
    last = jax.lax.cummax(jnp.where(segments != 0, index, -1), axis=1)
    before = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    found = jnp.take_along_axis(segments, jnp.maximum(before, 0), axis=1)
    return jnp.where(before < 0, 0, found)
