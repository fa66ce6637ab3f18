"""Reformer: attention to tokens with the same hash (Kitaev, Kaiser and Levskaya 2020, section 2).

Letters: R hash rounds in comments of arrays with an axis `rounds`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.attention.backends.tiling import PartialAttention, merge_partials
from transformer.attention.document_boundaries import token_segments
from transformer.attention.masks import Mask, dense_mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
    reject_memory,
    reject_weights,
)
from transformer.attention.projections import QKV, combine_heads, project_queries, project_values
from transformer.attention.rope import RoPE, apply_rope
from transformer.attention.sparse_ops.grouped_window import (
    attend_grouped,
    group_positions,
    split_groups_by_document,
)
from transformer.attention.sparse_ops.visible_key_counts import grouped_visible_keys
from transformer.attention.variants.sparse_configs import ReformerConfig
from transformer.layers.precise_einsum import accumulation_dtype
from transformer.taps import HEAD_OUTPUTS

SELF_ATTENTION_PENALTY = 1e4
"""Subtracted from the score of a token with itself: used only if no other key is visible.

The paper's 1e5 exceeds the range of float16.
"""


KEY_NORM_EPSILON = 1e-6


@register_mixer
class Reformer(Mixer):
    """Attention within hash buckets. No cache: decoding would search the buckets of every round."""

    config: ReformerConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: ReformerConfig) -> Abilities:
        return Abilities(cached=False, cross=False, weights=False)

    @staticmethod
    def constants(config: ReformerConfig, layer: int, width: int) -> dict[str, np.ndarray]:
        """Draw the rotations [rounds, N, H, buckets / 2] from the seed and the layer."""
        sizes = (
            config.num_hashes,
            config.num_heads,
            config.resolved_head_dim(width),
            config.num_buckets // 2,
        )
        # NumPy, whose generator gives the same rotations on every backend and version of JAX.
        random = np.random.default_rng([config.seed, layer])
        return {"rotations": random.normal(size=sizes).astype(np.float32)}

    @staticmethod
    def score_flops(config: ReformerConfig, width: int, length: int) -> ScoreFlops:
        """Count, per round, the rotation and attention to at most `window` members of a bucket."""
        each = config.num_heads * config.resolved_head_dim(width) * config.num_buckets
        flops = grouped_visible_keys(config.window, length).flops(config, width)
        return ScoreFlops(*(config.num_hashes * (each + members) for members in flops))

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise ValueError("mixer reformer: has no cache; decode with mixer full or routing")

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config = self.config
        reject_memory(config.kind, inputs.memory)
        reject_weights(config.kind, inputs.outputs)
        reject_mask_patterns(config.kind, inputs.mask)
        q, k, v = self.project(x, inputs)
        groups = self.bucket_ids(q, inputs.mask, inputs.constants)
        y = self.attend_hashed(q, k, v, groups, inputs.mask.pattern.causal)
        return combine_heads(self, y, inputs)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:  # [B, T, N, H] each
        """Declare the projections; keys are normalized queries."""
        config = self.config
        q = project_queries(self, x, config, self.context)
        if isinstance(config.position, RoPE):
            q = apply_rope(q, inputs.positions, config.position)
        return QKV(q, normalize_keys(q), project_values(self, x, config, self.context))

    def attend_hashed(
        self,
        q: jax.Array,  # [B, T, N, H]
        k: jax.Array,  # [B, T, N, H]
        v: jax.Array,  # [B, T, N, H]
        groups: jax.Array,  # [rounds, B, N, T]
        causal: bool,
    ) -> jax.Array:  # [B, T, N, H]
        """Attend in all rounds at once, as rounds * N heads, and merge the rounds (equation 5)."""
        # Rounds are independent attention over other groups of the same tokens: as heads of their
        # own they are one call.
        config, (rounds, batch, heads, length) = self.config, groups.shape
        operands, softmax_dtype = v.dtype, self.context.precision.softmax
        sums = accumulation_dtype(
            operands, softmax_dtype
        )  # to merge the rounds, and add up their gradients
        # The order of heads is round-major: head r * N + n is head n in round r.
        repeat_per_round = lambda each: jnp.tile(each.astype(sums), (1, 1, rounds, 1))  # noqa: E731
        # Every round gets the positions of all rounds, to count in how many of them a key is
        # visible.
        marks = jnp.moveaxis(self.bucket_positions(groups), 0, -1)  # [B, N, T, rounds]
        attended = attend_grouped(
            repeat_per_round(q),
            repeat_per_round(k),
            repeat_per_round(v),
            jnp.moveaxis(groups, 0, 1).reshape(batch, rounds * heads, length),
            config.window,
            causal=causal,
            scale=1 / math.sqrt(q.shape[-1]),
            softmax_dtype=softmax_dtype,
            operand_dtype=operands.name,
            score_bias_fn=functools.partial(duplicate_correction, config.window),
            bias_inputs=jnp.tile(marks, (1, rounds, 1, 1)),
        )
        # Equation 5: the rounds' results weighted by exp(lse_round - logsumexp over rounds lse).
        y, lse = jnp.split(attended.y, rounds, axis=2), jnp.split(attended.lse, rounds, axis=1)
        return merge_partials(
            [PartialAttention(*each) for each in zip(y, lse, strict=True)]
        ).y.astype(operands)

    def bucket_ids(
        self,
        q: jax.Array,  # [B, T, N, H]
        mask: Mask,
        constants: Any,
    ) -> jax.Array:  # [rounds, B, N, T]
        """Return the bucket of each token in each round, separate for each document."""
        buckets = hash_buckets(q, jnp.asarray(constants["rotations"]))
        here = token_segments(mask, q.shape[1])
        split = functools.partial(
            split_groups_by_document, num_groups=self.config.num_buckets, documents=here
        )
        return jax.vmap(split)(buckets)

    def bucket_positions(self, groups: jax.Array) -> jax.Array:  # [rounds, B, N, T] each
        """Return, per round, numbers whose differences encode visibility (`group_positions`)."""
        return jax.vmap(functools.partial(group_positions, window=self.config.window))(groups)

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B, N, T, T] booleans
        """Return the keys visible in any round, and the token itself where there is no other."""
        length = heads.q.shape[1]
        where = self.bucket_positions(self.bucket_ids(heads.q, inputs.mask, inputs.constants))
        near = jnp.abs(where[..., :, None] - where[..., None, :]) < self.config.window
        itself = jnp.eye(length, dtype=bool)[None, None]
        visible = dense_mask(inputs.mask, length, length)[:, None]
        # The penalty of the token itself is finite, so that it wins only where nothing else is
        # visible.
        others = near.any(0) & visible & ~itself
        return others | (itself & ~others.any(-1, keepdims=True))


def normalize_keys(q: jax.Array) -> jax.Array:  # [B, T, N, H] -> [B, T, N, H]
    """Return queries rescaled to length sqrt(H), which serve as keys.

    Scores times 1 / sqrt(H) are then q_i . q_j / |q_j|, as in the paper's code; the paper's
    equations omit the root.
    """
    wide = q.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + KEY_NORM_EPSILON)).astype(q.dtype)


def hash_buckets(
    q: jax.Array,  # [B, T, N, H]
    rotations: jax.Array,  # [rounds, N, H, buckets / 2]
) -> jax.Array:  # [rounds, B, N, T]
    """Return argmax([q R; -q R]) (section 2, locality sensitive hashing)."""
    # In float32: a projection rounded to 16 bits could move a token to another bucket. An argmax
    # has no gradient anyway.
    wide = jax.lax.stop_gradient(q).astype(jnp.float32)

    def one(rotation: jax.Array) -> jax.Array:  # [N, H, buckets / 2] -> [B, N, T]
        rotated = jnp.einsum("BTNH,NHM->BNTM", wide, rotation)
        return jnp.argmax(jnp.concatenate([rotated, -rotated], axis=-1), axis=-1)

    # One round at a time: all of [rounds, B, N, T, buckets] would be the largest array of the
    # mixer.
    return jax.lax.map(one, rotations)


def duplicate_correction(
    window: int,
    q_positions: jax.Array,  # [B, N, R, rounds]
    k_positions: jax.Array,  # [B, N, C, rounds]
) -> jax.Array:  # [B, N, R, C]
    """Return -log(number of rounds that show the key); -1e4 for the token itself (equation 6)."""
    gap = lambda r: jnp.abs(q_positions[..., :, None, r] - k_positions[..., None, :, r])  # noqa: E731
    # A key that c rounds show is counted c times by the merge, so its weight is divided by c.
    count = sum(gap(r) < window for r in range(q_positions.shape[-1]))
    return -jnp.where(
        gap(0) == 0, SELF_ATTENTION_PENALTY, jnp.log(jnp.maximum(count, 1).astype(jnp.float32))
    )
