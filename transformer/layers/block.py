"""One layer: a mixer, optional cross-attention and a feed-forward, each with norm and residual."""

from typing import Any, NamedTuple

import jax
from flax import linen as nn

from transformer.attention.mixer import MixerInputs, apply_mixer, explain_mixer_errors, mixer_class
from transformer.config import BlockConfig
from transformer.layers.basic import Norm, dropout, fold_in
from transformer.layers.cross_attention import (
    BlockCache,
    BlockConstants,
    Memory,
    add_cross_attention,
)
from transformer.layers.feedforward import FeedForward
from transformer.layers.layer_config import MoEConfig
from transformer.layers.moe import MixtureOfExperts
from transformer.model_context import ModelContext


def layer_constants(config: BlockConfig, layer_index: int, context: ModelContext) -> Any:
    """Return the non-trainable values of one layer's mixers, as `Block` takes them."""
    mixers = [each for each in (config.mixer, config.cross_attention) if each is not None]
    found = []
    for each in mixers:
        with explain_mixer_errors(each):
            found.append(mixer_class(each).constants(each, layer_index, context.d_model))
    return BlockConstants(*found) if len(found) > 1 else found[0]


class BlockOutput(NamedTuple):
    """Result of a layer."""

    x: jax.Array  # [B, T, D] residual stream
    cache: Any
    aux: dict[str, Any]  # requested auxiliary outputs; those of cross-attention begin with `cross_`


class Block(nn.Module):
    """One layer. Its submodules are `mixer`, `cross`, `feed_forward` and their norms."""

    config: BlockConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        inputs: MixerInputs,  # with cross-attention: BlockCache and BlockConstants
        memory: Memory | None = None,
    ) -> BlockOutput:
        config, context = self.config, self.context
        cache, constants = inputs.cache, inputs.constants
        own_cache, cross_cache = cache if isinstance(cache, BlockCache) else (cache, None)
        has_cross = isinstance(constants, BlockConstants)
        own_constants, cross_constants = constants if has_cross else (constants, None)

        def rngs(stream: int) -> jax.Array | None:  # [B]
            # One stream for each dropout. Resumed runs rely on the numbers: they must not change.
            return fold_in(inputs.dropout_rngs, stream)

        mixer = mixer_class(config.mixer)(config.mixer, context, name="mixer")
        normed = self.pre_norm("mixer_norm", x)
        own = inputs.replace(cache=own_cache, dropout_rngs=rngs(0), constants=own_constants)
        if memory is not None and config.mixer.reads_memory:
            own = own.replace(mask=memory.mask, memory=memory.x)
        mixed = apply_mixer(mixer, normed, own)
        before, x = x, self.add_residual("mixer_norm", x, mixed.y, rngs(1))
        cache, aux = mixed.cache, mixed.aux

        if config.cross_attention is not None:
            own = inputs.replace(cache=cross_cache, constants=cross_constants)
            x, crossed = add_cross_attention(self, x, own, memory, rngs(4), rngs(5))
            cache = cache if cross_cache is None else BlockCache(cache, crossed.cache)
            aux = aux | {f"cross_{name}": value for name, value in crossed.aux.items()}

        if config.feed_forward is not None:
            feed_forward: FeedForward | MixtureOfExperts
            if isinstance(config.feed_forward, MoEConfig):
                feed_forward = MixtureOfExperts(config.feed_forward, context, name="feed_forward")
            else:
                feed_forward = FeedForward(config.feed_forward, context, name="feed_forward")
            parallel = config.norm_placement == "parallel"
            normed = self.pre_norm("feed_forward_norm", before if parallel else x)
            segments = inputs.mask.segments
            token_mask = None if segments is None else segments != 0
            fed = feed_forward(normed, rngs(2), token_mask=token_mask, outputs=inputs.outputs)
            x = self.add_residual("feed_forward_norm", x, fed.y, rngs(3))
            aux = aux | fed.aux
        return BlockOutput(x, cache, aux)

    def pre_norm(self, name: str, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        """Return the input of a sublayer: x, normalized unless the block is post-norm."""
        return x if self.config.norm_placement == "post" else self.apply_norm(name, x)

    def add_residual(
        self,
        name: str,
        x: jax.Array,  # [B, T, D] residual stream
        y: jax.Array,  # [B, T, D] output of the sublayer
        dropout_rngs: jax.Array | None,  # [B]
    ) -> jax.Array:  # [B, T, D]
        """Add a sublayer's output to the residual stream, with dropout and norms."""
        config = self.config
        if config.norm_placement == "sandwich":
            y = self.apply_norm(name.replace("norm", "output_norm"), y)
        y = dropout(y, config.residual_dropout, dropout_rngs)
        x = x + y if config.residual else y
        x = self.apply_norm(name, x) if config.norm_placement == "post" else x
        return self.context.constrain(x, ("batch", "length", None))

    def apply_norm(self, name: str, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        """Apply the norm `name`; identity if the block has none."""
        if self.config.norm is None or (name == "mixer_norm" and not self.config.mixer_norm):
            return x
        return Norm(self.config.norm, self.context, name=name)(x)
