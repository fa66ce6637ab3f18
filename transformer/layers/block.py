"""One layer: a mixer, cross attention if there is a memory, and a feed-forward.

Each sublayer has a norm and a residual connection.
"""

from typing import Any, NamedTuple

import jax
from flax import linen as nn

from transformer.attention.base import MixerInputs, mixer_class
from transformer.attention.masks import Mask
from transformer.config import BlockConfig
from transformer.context import ModelContext
from transformer.layers.config import FeedForwardConfig, MoEConfig
from transformer.layers.dropout import dropout, fold_in
from transformer.layers.feedforward import FeedForward
from transformer.layers.moe import MixtureOfExperts
from transformer.layers.norms import Norm


class Memory(NamedTuple):
    """What a decoder looks at: an encoder's output, and which of it each query sees."""

    x: jax.Array | None  # [B, S, D]; None when caches hold what is needed of it
    mask: Mask


class BlockCache(NamedTuple):
    """The caches of a layer that has cross attention."""

    mixer: Any
    cross_attention: Any


class BlockConstants(NamedTuple):
    """The constants of a layer that has cross attention."""

    mixer: Any
    cross_attention: Any


class BlockOutput(NamedTuple):
    """What a layer hands on."""

    x: jax.Array  # [B, T, D]
    cache: Any
    aux: dict[str, Any]


class Block(nn.Module):
    """A mixer, then cross attention if there is any, then a feed-forward."""

    config: BlockConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        inputs: MixerInputs,  # of self-attention; cache and constants also hold those of `cross`
        memory: Memory | None = None,
    ) -> BlockOutput:
        config, shared, cache, constants = self.config, self.context, inputs.cache, inputs.constants
        own, other = cache if isinstance(cache, BlockCache) else (cache, None)
        fixed, others = constants if isinstance(constants, BlockConstants) else (constants, None)
        rngs = inputs.dropout_rngs
        mixer = mixer_class(config.mixer)(config.mixer, shared, name="mixer")
        read = self.pre_norm("mixer_norm", x)
        given = inputs.replace(cache=own, dropout_rngs=fold_in(rngs, 0), constants=fixed)
        if memory is not None and config.mixer.reads_memory:
            given = given.replace(mask=memory.mask, memory=memory.x)
        mixed = mixer(read, given)
        x = self.add_residual("mixer_norm", x, mixed.y, fold_in(rngs, 1))
        cache, aux = mixed.cache, mixed.aux
        if config.cross_attention is not None:
            if memory is None:
                raise ValueError("a layer with cross attention: has no memory; use EncoderDecoder")
            cross = mixer_class(config.cross_attention)(
                config.cross_attention, shared, name="cross"
            )
            read = self.pre_norm("cross_norm", x)
            given = inputs.replace(
                mask=memory.mask,
                memory=memory.x,
                cache=other,
                dropout_rngs=fold_in(rngs, 4),
                constants=others,
            )
            looked_up = cross(read, given)
            x = self.add_residual("cross_norm", x, looked_up.y, fold_in(rngs, 5))
            cache = cache if other is None else BlockCache(cache, looked_up.cache)
            aux = aux | {f"cross_{name}": value for name, value in looked_up.aux.items()}
        if config.feed_forward is not None:
            feed_forward = self.make_feed_forward(config.feed_forward)
            read = self.pre_norm("feed_forward_norm", x)
            real = None if inputs.mask.segments is None else inputs.mask.segments != 0
            fed = feed_forward(read, fold_in(rngs, 2), real=real, outputs=inputs.outputs)
            x = self.add_residual("feed_forward_norm", x, fed.y, fold_in(rngs, 3))
            aux = aux | fed.aux
        return BlockOutput(x, cache, aux)

    def make_feed_forward(
        self, config: FeedForwardConfig | MoEConfig
    ) -> FeedForward | MixtureOfExperts:
        if isinstance(config, MoEConfig):
            return MixtureOfExperts(config, self.context, name="feed_forward")
        return FeedForward(config, self.context, name="feed_forward")

    def pre_norm(self, name: str, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        """What a sublayer reads: the norm of the residual stream, or the stream itself."""
        return x if self.config.norm_placement == "post" else self.apply_norm(name, x)

    def add_residual(
        self,
        name: str,
        x: jax.Array,  # [B, T, D] the residual stream
        y: jax.Array,  # [B, T, D] the sublayer's result
        dropout_rngs: jax.Array | None,  # [B]
    ) -> jax.Array:  # [B, T, D]
        """The residual stream with the sublayer's result added."""
        config = self.config
        if config.norm_placement == "sandwich":
            y = self.apply_norm(name.replace("norm", "output_norm"), y)
        y = dropout(y, config.residual_dropout, dropout_rngs)
        x = x + y if config.residual else y
        x = self.apply_norm(name, x) if config.norm_placement == "post" else x
        return self.context.constrain(x, ("batch", "length", None))

    def apply_norm(self, name: str, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        if self.config.norm is None:
            return x
        return Norm(self.config.norm, self.context.precision, name=name)(x)
