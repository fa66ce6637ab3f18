"""Primer's attention: a convolution over three tokens after each projection (So et al. 2021)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.attend import Scoring, attend
from transformer.cache import KVCache
from transformer.dropout import fold
from transformer.linear import linear
from transformer.masks import Mask
from transformer.mixers import MIXERS, Abilities, Mixer, MixerInputs, MixerOutput, ScoreFlops
from transformer.positions import Rotary, rotate
from transformer.refusals import refuse_memory
from transformer.relations import relation
from transformer.shifts import around, remembered
from transformer.variants.configs import PrimerConfig as PrimerConfig
from transformer.weights import weight

TAPS = 3
PROJECTIONS = ("query", "key", "value")


class PrimerCache(struct.PyTreeNode):
    """Keys and values after the convolution, and the last two of each projection before it."""

    kv: KVCache
    past: tuple[jax.Array, ...]  # [B, 2, N, H] of queries, keys and values


class Primer(Mixer):
    """Softmax attention among convolved queries, keys and values."""

    config: PrimerConfig

    @staticmethod
    def abilities(config: PrimerConfig) -> Abilities:
        return Abilities(cross=False)

    @staticmethod
    def constants(config: PrimerConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: PrimerConfig, width: int, length: int) -> ScoreFlops:
        each = config.heads * 2 * config.width_of_heads(width)
        return ScoreFlops(full=2 * each * length, causal=each * (length + 1))

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> PrimerCache:
        heads = (self.config.heads, self.config.width_of_heads(self.shared.width))
        room = lambda size: jnp.zeros((batch, size, *heads), self.shared.precision.compute)  # noqa: E731
        past = tuple(room(TAPS - 1) for _ in PROJECTIONS)
        return PrimerCache(KVCache(room(length), room(length)), past)

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        mask, cache = inputs.mask, inputs.cache
        config, shared = self.config, self.shared
        refuse_memory(config.kind, inputs.memory)
        head = config.width_of_heads(shared.width)
        axes, embed = {"heads": config.heads, "head": head}, {"embed": shared.width}
        project = functools.partial(linear, self, inputs=embed, outputs=axes, shared=shared)
        made = [project(name, x, bias=config.bias) for name in PROJECTIONS]
        past = [None] * len(made) if cache is None else cache.past
        q, k, v = (
            self.convolved(name, each, before, inputs.positions, mask)
            for name, each, before in zip(PROJECTIONS, made, past, strict=True)
        )
        if isinstance(config.position, Rotary):
            q, k = (rotate(each, inputs.positions, config.position) for each in (q, k))
        if cache is not None:
            kv = cache.kv.write(k, v, inputs.positions)
            last = (
                remembered(*both, inputs.positions) for both in zip(cache.past, made, strict=True)
            )
            cache = PrimerCache(kv, tuple(last))
            k, v, mask = kv.keys, kv.values, mask.over(kv.positions, holds_queries=True)
        related = relation(
            self, config.position, shared, heads=config.heads, key_width=head, value_width=head
        )
        scoring = Scoring(
            scale=1 / math.sqrt(head),
            **related._asdict(),
            softmax_dtype=shared.precision.softmax,
            rate=config.dropout,
            dropout_rngs=fold(inputs.dropout_rngs, 0),
        )
        how: Any = dict(
            hardware=shared.hardware, constrain=shared.constrain, outputs=inputs.outputs
        )
        attended = attend(q, k, v, mask, scoring, **how)
        y = linear(self, "output", attended.y, axes, embed, shared, bias=config.bias, residual=True)
        return MixerOutput(y, cache, attended.aux)

    def convolved(
        self,
        name: str,
        x: jax.Array,  # [B, T, N, H]
        past: jax.Array | None,  # [B, 2, N, H]
        positions: jax.Array,  # [B or 1, T]
        mask: Mask,
    ) -> jax.Array:  # [B, T, N, H]
        """A weighted sum of each token and the two before it, channel by channel.

        Without a causal mask it is one on each side. It starts as half of the token itself, and a
        sixth of each neighbour.
        """
        ahead = 0 if mask.pattern.causal else 1
        behind = TAPS - 1 - ahead
        if past is not None and ahead:
            raise ValueError("mixer primer: decodes under a causal mask alone; give one")

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jnp.full(shape, 0.5 / TAPS, dtype).at[behind].set(0.5)

        outputs = {"taps": TAPS, "heads": x.shape[2], "head": x.shape[3]}
        dtype = self.shared.precision.parameters
        taps = weight(self, f"{name}_taps", outputs=outputs, init=init, dtype=dtype)
        seen = around(x, behind, ahead, positions=positions, mask=mask, past=past)
        y = jnp.sum(seen * taps.astype(x.dtype)[None, None], axis=2)
        return self.shared.constrain(y, ("batch", "length", "heads", None))


MIXERS[PrimerConfig.kind] = Primer
