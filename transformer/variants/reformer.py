"""Reformer's attention: to tokens that hash alike (Kitaev, Kaiser and Levskaya 2020, section 2)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.attend import Looked, merge
from transformer.attend.sparse.grouped_window import attend_grouped, places, within_documents
from transformer.contract import wide
from transformer.documents import documents
from transformer.heads import Heads, join, query_heads, value_heads
from transformer.masks import Mask, dense
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.positions import Rotary, rotate
from transformer.refusals import refuse_memory, refuse_patterns, refuse_weights
from transformer.variants.configs import ReformerConfig as ReformerConfig
from transformer.variants.keys_seen import in_groups

ITSELF = 1e4
"""What a token's score of itself loses: nothing else has so little. The paper's 1e5 is more than
float16 can hold."""
EPSILON = 1e-6


class Reformer(Mixer):
    """It has no cache: a token would have to be found in the buckets of every round."""

    config: ReformerConfig

    @staticmethod
    def abilities(config: ReformerConfig) -> Abilities:
        return Abilities(cached=False, cross=False, weights=False)

    @staticmethod
    def constants(config: ReformerConfig, layer: int, width: int) -> dict[str, np.ndarray]:
        """Rotations [rounds, N, H, buckets / 2], a function of seed and layer."""
        sizes = (config.rounds, config.heads, config.query_width(width), config.buckets // 2)
        random = np.random.default_rng([config.seed, layer])
        return {"rotations": random.normal(size=sizes).astype(np.float32)}

    @staticmethod
    def score_flops(config: ReformerConfig, width: int, length: int) -> ScoreFlops:
        """Of each round, products with the rotation and with the members of a bucket, at most."""
        each = config.heads * config.query_width(width) * config.buckets
        found = in_groups(config.window, length).flops(config, width)
        return ScoreFlops(*(config.rounds * (each + members) for members in found))

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise ValueError("mixer reformer: has no cache; decode with mixer full or routing")

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, shared = self.config, self.shared
        refuse_memory(config.kind, inputs.memory)
        refuse_weights(config.kind, inputs.outputs)
        refuse_patterns(config.kind, inputs.mask)
        q, k, v = self.project(x, inputs)
        groups = self.groups(q, inputs.mask, inputs.constants)
        y = self.looked_up(q, k, v, groups, inputs.mask.pattern.causal)
        return MixerOutput(join(self, y, config, shared), None, {})

    def project(self, x: jax.Array, inputs: MixerInputs) -> Heads:  # [B, T, N, H] each
        """Declare the projections; keys are normalized queries."""
        config = self.config
        q = query_heads(self, x, config, self.shared)
        if isinstance(config.position, Rotary):
            q = rotate(q, inputs.positions, config.position)
        return Heads(q, normalized(q), value_heads(self, x, config, self.shared))

    def looked_up(
        self,
        q: jax.Array,  # [B, T, N, H]
        k: jax.Array,  # [B, T, N, H]
        v: jax.Array,  # [B, T, N, H]
        groups: jax.Array,  # [rounds, B, N, T]
        causal: bool,
    ) -> jax.Array:  # [B, T, N, H]
        """All rounds at once, each as N heads more, then merged (equation 5)."""
        config, (rounds, batch, heads, length) = self.config, groups.shape
        operands, softmax_dtype = v.dtype, self.shared.precision.softmax
        sums = wide(operands, softmax_dtype)  # to merge the rounds, and add up their gradients
        many = lambda each: jnp.tile(each.astype(sums), (1, 1, rounds, 1))  # noqa: E731
        marks = jnp.moveaxis(self.places(groups), 0, -1)  # [B, N, T, rounds]
        looked = attend_grouped(
            many(q),
            many(k),
            many(v),
            jnp.moveaxis(groups, 0, 1).reshape(batch, rounds * heads, length),
            config.window,
            causal=causal,
            scale=1 / math.sqrt(q.shape[-1]),
            softmax_dtype=softmax_dtype,
            operands=operands.name,
            gain=functools.partial(discount, config.window),
            marks=jnp.tile(marks, (1, rounds, 1, 1)),
        )
        y, lse = jnp.split(looked.y, rounds, axis=2), jnp.split(looked.lse, rounds, axis=1)
        return merge([Looked(*each) for each in zip(y, lse, strict=True)]).y.astype(operands)

    def groups(
        self,
        q: jax.Array,  # [B, T, N, H]
        mask: Mask,
        constants: Any,
    ) -> jax.Array:  # [rounds, B, N, T]
        """The bucket of each token in each round, one for each document."""
        found = buckets(q, jnp.asarray(constants["rotations"]))
        here = documents(mask, q.shape[1])
        apart = functools.partial(within_documents, count=self.config.buckets, documents=here)
        return jax.vmap(apart)(found)

    def places(self, groups: jax.Array) -> jax.Array:  # [rounds, B, N, T] each
        """What tells, round by round, who sees whom."""
        return jax.vmap(functools.partial(places, window=self.config.window))(groups)

    @nn.nowrap
    def select(
        self,
        heads: Heads,
        inputs: MixerInputs,
    ) -> jax.Array:  # [B, N, T, T] booleans
        """What any round shows, and a token itself where there is nothing else."""
        length = heads.q.shape[1]
        where = self.places(self.groups(heads.q, inputs.mask, inputs.constants))
        near = jnp.abs(where[..., :, None] - where[..., None, :]) < self.config.window
        itself = jnp.eye(length, dtype=bool)[None, None]
        shown = dense(inputs.mask, length, length)[:, None]
        others = near.any(0) & shown & ~itself
        return others | (itself & ~others.any(-1, keepdims=True))


def normalized(q: jax.Array) -> jax.Array:  # [B, T, N, H] -> [B, T, N, H]
    """Keys: queries of length sqrt(H), so that scores times 1/sqrt(H) are q_i q_j / |q_j|.

    This is the paper's score; its equations leave out the root.
    """
    wide = q.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + EPSILON)).astype(q.dtype)


def buckets(
    q: jax.Array,  # [B, T, N, H]
    rotations: jax.Array,  # [rounds, N, H, buckets / 2]
) -> jax.Array:  # [rounds, B, N, T]
    """argmax([q R; -q R]) (section 2, locality sensitive hashing)."""
    wide = jax.lax.stop_gradient(q).astype(jnp.float32)

    def one(rotation: jax.Array) -> jax.Array:  # [N, H, buckets / 2] -> [B, N, T]
        turned = jnp.einsum("BTNH,NHM->BNTM", wide, rotation)
        return jnp.argmax(jnp.concatenate([turned, -turned], axis=-1), axis=-1)

    return jax.lax.map(one, rotations)


def discount(
    window: int,
    q_places: jax.Array,  # [B, N, R, rounds]
    k_places: jax.Array,  # [B, N, C, rounds]
) -> jax.Array:  # [B, N, R, C]
    """-log of the number of rounds that show the key; of a token itself, -1e4 (equation 6)."""
    gap = lambda r: jnp.abs(q_places[..., :, None, r] - k_places[..., None, :, r])  # noqa: E731
    count = sum(gap(r) < window for r in range(q_places.shape[-1]))
    return -jnp.where(gap(0) == 0, ITSELF, jnp.log(jnp.maximum(count, 1).astype(jnp.float32)))


MIXERS[ReformerConfig.kind] = Reformer
