"""Masks as data: a static pattern, and the arrays that it refers to.

A flash kernel reads this description and never builds [T, S] booleans. `dense_mask` builds them,
for the reference implementation and as the oracle of every kernel.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from transformer.validation import NonNegativeInt, PositiveInt, Settings, check_shapes

Segments = Int[Array, "#B T"] | Bool[Array, "#B T"]
"""Document of each token, from 1; 0 is padding. Booleans: True for the tokens of one document."""


KeySegments = Int[Array, "#B S"] | Bool[Array, "#B S"]
"""Document of each key."""


@dataclasses.dataclass(frozen=True)
class MaskPattern(Settings):
    """Static part of a mask, known at compile time. Hashable."""

    causal: bool = False
    """A query sees keys at its own position and before."""
    window: NonNegativeInt = 0
    """A query sees keys less than `window` (times `dilation`) positions away. 0: all."""
    dilation: PositiveInt = 1
    """In the window, a query sees only keys at distances that are multiples of this."""
    prefix: bool = False
    """All queries see keys at positions below `Mask.prefix_lengths`, causal or not."""
    ordered: bool = True
    """In each segment, positions are consecutive, so causal masks and windows can be read off the
    index. False for reordered tokens (ring attention), which only positions describe."""


class Mask(struct.PyTreeNode):
    """Mask of T queries over S keys. In any array, B may be 1 for all examples.

    Key arrays that are None equal those of the queries (self-attention).
    """

    pattern: MaskPattern = struct.field(pytree_node=False, default=MaskPattern())  # static
    positions: Int[Array, "#B T"] | None = None  # of the queries
    key_positions: Int[Array, "#B S"] | None = None
    segments: Segments | None = None  # document of each query; 0 is padding
    key_segments: KeySegments | None = None
    key_lengths: Int[Array, "#B"] | None = None  # number of keys before padding
    prefix_lengths: Int[Array, "#B"] | None = None
    global_positions: Int[Array, "#B n"] | None = None  # see all and are seen by all; -1: none
    allowed: Bool[Array, "#B T S"] | None = None  # False hides the key
    keys_include_queries: bool = struct.field(pytree_node=False, default=False)
    """The keys at `key_positions` include the queries' own, as in a cache, so no row is empty."""
    single_document: bool = struct.field(pytree_node=False, default=False)
    """No row packs several documents: `segments` only marks padding. The mask hides the same keys
    either way, but mixers without support for packed documents then accept it."""

    def with_keys(
        self,
        key_positions: Int[Array, "#B S"],
        key_segments: KeySegments | None = None,
        *,
        keys_include_queries: bool = False,
    ) -> "Mask":
        """Return the mask of the same queries over other keys, such as those of a cache."""
        return self.replace(
            key_positions=key_positions,
            key_segments=key_segments,
            keys_include_queries=keys_include_queries,
        )

    def resolved_positions(
        self,
        num_queries: int,  # T
        num_keys: int,  # S
    ) -> tuple[Int[Array, "#B T"], Int[Array, "#B S"]]:
        """Return the positions of queries and keys; by default they count from 0."""
        matched = self.keys_match_queries(num_queries, num_keys)
        key_positions = self.positions if matched else self.key_positions
        positions = positions_or_arange(self.positions, num_queries)
        return positions, positions_or_arange(key_positions, num_keys)

    def keys_match_queries(
        self,
        num_queries: int,  # T
        num_keys: int,  # S
    ) -> bool:
        """Return True in self-attention: the keys are the queries' own tokens, in their order."""
        return self.key_positions is None and num_queries == num_keys

    @property
    def resolved_key_segments(self) -> KeySegments | None:
        """Document of each key; by default those of the queries."""
        return self.segments if self.key_segments is None else self.key_segments

    @property
    def has_extra_masks(self) -> bool:
        """Return True if arrays other than segments hide or show keys."""
        arrays = (self.key_lengths, self.prefix_lengths, self.global_positions, self.allowed)
        return any(array is not None for array in arrays)

    def may_have_empty_rows(
        self,
        num_queries: int,  # T
        num_keys: int,  # S
    ) -> bool:
        """Return True if a query without a visible key is possible; known at compile time."""
        if any(array is not None for array in (self.segments, self.key_lengths, self.allowed)):
            return True
        # A query that sees itself has at least one key. That holds for a causal mask or a window
        # if its own key is among the keys, which differing lengths or positions leave open.
        matched = self.keys_match_queries(num_queries, num_keys)
        sees_itself = self.keys_include_queries or matched
        return (self.pattern.causal or self.pattern.window > 0) and not sees_itself


def dense_mask(
    mask: Mask,
    num_queries: int,  # T
    num_keys: int,  # S
) -> Bool[Array, "#B T S"]:
    """Return the mask as booleans, True where the query sees the key."""
    check_mask(mask, num_queries, num_keys)
    pattern = mask.pattern
    query_positions, key_positions = mask.resolved_positions(num_queries, num_keys)
    q, k = query_positions[:, :, None], key_positions[:, None, :]
    visible = jnp.ones(jnp.broadcast_shapes(q.shape, k.shape), bool)
    # By position, not by index: the slots of a cache and the shards of a ring are not in order.
    if pattern.causal:
        visible &= k <= q
    if pattern.window:
        distance = jnp.abs(q - k)
        reach = pattern.window * pattern.dilation
        visible &= (distance < reach) & (distance % pattern.dilation == 0)
    # From here on arrays show keys that the pattern hides.
    if pattern.prefix and mask.prefix_lengths is not None:
        visible |= k < mask.prefix_lengths[:, None, None]
    if mask.global_positions is not None:
        global_positions = mask.global_positions[:, None, :]
        to_global = jnp.any(k.swapaxes(1, 2) == global_positions, axis=-1)[:, None, :]
        from_global = jnp.any(q == global_positions, axis=-1)[:, :, None]
        # Global tokens lift the window, not causality: a decoder must not see its targets.
        future = (k > q) if pattern.causal else jnp.zeros_like(visible)
        visible |= (to_global | from_global) & ~future
    # Segments and lengths come last: neither a prefix nor a global token shows what they hide.
    key_segments = mask.resolved_key_segments
    if mask.segments is not None and key_segments is not None:
        # Padding has segment 0 and is seen by nothing, not even by itself: its rows are empty.
        same_segment = mask.segments[:, :, None] == key_segments[:, None, :]
        visible = visible & same_segment & (key_segments != 0)[:, None, :]
    if mask.key_lengths is not None:  # by index: padding at the end has no meaningful position
        visible &= jnp.arange(num_keys)[None, None, :] < mask.key_lengths[:, None, None]
    if mask.allowed is not None:
        visible = visible & mask.allowed
    return visible


def positions_or_arange(
    positions: Int[Array, "#B T"] | None,
    length: int,  # T
) -> Int[Array, "#B T"]:
    """Return `positions`, or 0 to T - 1 if None."""
    return jnp.arange(length)[None, :] if positions is None else positions


def check_mask(
    mask: Mask,
    num_queries: int,  # T
    num_keys: int,  # S
) -> None:
    """Raise ValueError unless the arrays of the mask have their annotations' shapes and dtypes."""
    check_shapes(
        {"T": num_queries, "S": num_keys},
        positions=(mask.positions, "B? T | None", int),
        key_positions=(mask.key_positions, "B? S | None", int),
        segments=(mask.segments, "B? T | None", int, bool),
        key_segments=(mask.resolved_key_segments, "B? S | None", int, bool),
        key_lengths=(mask.key_lengths, "B? | None", int),
        prefix_lengths=(mask.prefix_lengths, "B? | None", int),
        global_positions=(mask.global_positions, "B? n | None", int),
        allowed=(mask.allowed, "B? T S | None", bool),
    )
