"""Longformer: a window for every token, and a few global tokens (Beltagy et al. 2020)."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attend import Looked, Scoring, merge
from transformer.attend.sparse.dilated import attend_dilated
from transformer.attend.sparse.global_tokens import (
    are_global,
    attend_to_globals,
    distinct,
    global_index,
)
from transformer.attend.sparse.packed_globals import to_packed, with_packed_rows
from transformer.attend.sparse.rows import look_rows, put_rows, take_rows
from transformer.checks import check_least, check_share
from transformer.documents import documents
from transformer.dropout import fold
from transformer.heads import Heads, HeadsConfig, join, project, projected_less, query_heads
from transformer.masks import Mask
from transformer.mixers import MIXERS, NOTHING, Abilities, Mixer, MixerOutput, Want
from transformer.positions import NoPosition, Rotary
from transformer.refusals import refuse_memory, refuse_patterns, refuse_weights


@dataclasses.dataclass(frozen=True)
class LongformerConfig(HeadsConfig):
    """Every token sees its window and the global tokens, which see everything (section 3.1).

    What global tokens see they see by projections of their own: `query_global`, `key_global` and
    `value_global`. Other tokens see them by the ordinary ones.
    """

    kind: ClassVar[str] = "longformer"

    window: int = 256
    """Keys on each side, w / 2 in the paper's terms, beside the query's own. Under a causal mask
    those behind alone."""
    dilations: tuple[int, ...] = (1,)
    """Steps between the keys of the window, of each head, or one for all."""
    global_tokens: int = 1
    """So many tokens at the start of each document are global, such as [CLS], where the mask lists
    no `globals`."""
    position: NoPosition | Rotary = NoPosition()
    """What queries and keys know of each other's positions."""
    dropout: float = 0.0
    """Of the attention weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least("longformer.window", self.window, 0)
        check_least("longformer.global_tokens", self.global_tokens, 0)
        check_share("longformer.dropout", self.dropout)
        if len(self.dilations) not in (1, self.heads) or min(self.dilations) < 1:
            raise ValueError(
                f"longformer.dilations {self.dilations}: give one number from 1 on, or one for "
                f"each of {self.heads} heads"
            )


class Longformer(Mixer):
    """One softmax over window and global keys; of global queries, over all keys."""

    config: LongformerConfig

    @staticmethod
    def abilities(config: LongformerConfig) -> Abilities:
        return Abilities(cached=False, cross=False, weights=False)

    @staticmethod
    def constants(config: LongformerConfig, layer: int, width: int) -> None:
        return None

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise ValueError("mixer longformer: has no cache; decode with full or sliding_window")

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array,  # [B or 1, T]
        mask: Mask,  # its `globals` are positions in each document
        memory: jax.Array | None = None,
        cache: Any = None,
        keys: jax.Array | None = None,  # [B]
        constants: Any = None,
        want: Want = NOTHING,
    ) -> MixerOutput:
        config, shared = self.config, self.shared
        refuse_memory(config.kind, memory)
        refuse_weights(config.kind, want)
        refuse_patterns(config.kind, mask.replace(globals=None))
        if cache is not None:
            self.init_cache(*x.shape[:2])
        mask, listed, packed = self.described(mask, positions)
        own = project(self, x, positions, config, shared)
        index = None if packed else global_index(mask, listed)
        scoring = Scoring(
            scale=1 / math.sqrt(own.q.shape[-1]),
            softmax_dtype=shared.precision.softmax,
            rate=config.dropout,
            keys=keys,
        )
        near = self.near(own, mask, scoring, listed)
        if not listed.shape[1]:
            if self.is_initializing():  # another mask may list some
                project(self, x, positions, config, shared, "_global")
            return MixerOutput(join(self, near.y, config, shared), None, {})
        far, last = (scoring._replace(keys=fold(keys, part)) for part in (1, 2))
        if index is None:
            y = merge([near, to_packed(*own, mask, far, listed)]).y
            theirs = project(self, x, positions, config, shared, "_global")
            y = with_packed_rows(y, *theirs, mask, last, listed)
        else:
            y = merge([near, attend_to_globals(*own, mask, far, index)]).y
            y = put_rows(y, self.of_globals(x, positions, mask, last, index), index)
        return MixerOutput(join(self, y, config, shared), None, {})

    @nn.nowrap
    def described(
        self, mask: Mask, positions: jax.Array
    ) -> tuple[Mask, jax.Array, bool]:  # [B or 1, n] positions of global tokens
        """The mask with its arrays filled in, and whether there may be several documents."""
        length = positions.shape[1]
        first = jnp.arange(self.config.global_tokens)[None, :]
        listed = first if mask.globals is None else distinct(jnp.asarray(mask.globals))
        ones = jnp.ones((1, length), jnp.int32)
        real = documents(mask, length)
        filled = mask.replace(
            positions=jnp.asarray(positions if mask.positions is None else mask.positions),
            segments=ones if mask.segments is None else mask.segments,
            key_segments=ones if real is None else real,
            lengths=None,
            globals=None,
        )
        return filled, listed, mask.segments is not None

    @nn.nowrap
    def near(self, heads: Heads, mask: Mask, scoring: Scoring, listed: jax.Array) -> Looked:
        """What queries find in their window, global keys left out."""
        config = self.config
        segments: Any = mask.key_segments
        hidden = are_global(mask, listed)
        mask = mask.replace(key_segments=jnp.where(hidden, 0, segments))
        again = scoring._replace(keys=fold(scoring.keys, 0))
        sizes = config.window, config.dilations, self.shared.hardware.tile
        return attend_dilated(*heads, mask, again, *sizes)

    def of_globals(
        self,
        x: jax.Array,  # [B, T, D]
        positions: jax.Array,  # [B or 1, T]
        mask: Mask,
        scoring: Scoring,
        index: jax.Array,  # [B or 1, n]
    ) -> jax.Array:  # [B, n, N, H]
        """What the global tokens find, by projections of their own."""
        config, shared = self.config, self.shared
        rows = take_rows(x, jnp.broadcast_to(index, (len(x), index.shape[1])))
        projected = config.key_heads * config.query_width(shared.width)
        few = 2 * index.shape[1] * config.heads <= projected
        if few and config.qk_norm is None and not isinstance(config.position, Rotary):
            q = query_heads(self, rows, config, shared, "_global")

            def look(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                return look_rows(q, k, v, mask, scoring, index)

            return projected_less(self, q, x, look, config, shared, "_global")
        heads = project(self, x, positions, config, shared, "_global")
        q = take_rows(heads.q, index)
        return look_rows(q, heads.k, heads.v, mask, scoring, index)


MIXERS[LongformerConfig.kind] = Longformer
