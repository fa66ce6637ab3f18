"""One layer: a mixer and a feed-forward, each with a norm and a residual connection."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
from flax import linen as nn

from transformer.attention import AttentionConfig
from transformer.dropout import dropout, fold
from transformer.feedforward import FeedForward, FeedForwardConfig
from transformer.masks import Mask
from transformer.mixers import NOTHING, MixerConfig, Want, mixer_type
from transformer.norms import Norm, NormConfig
from transformer.shared import Shared


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One place of the layer pattern."""

    mixer: MixerConfig = AttentionConfig()
    """What moves information between tokens."""
    feed_forward: FeedForwardConfig = FeedForwardConfig()
    norm: NormConfig = NormConfig()
    placement: Literal["pre", "post"] = "pre"
    """x + f(norm(x)), or norm(x + f(x)) as in Vaswani et al. 2017."""
    dropout: float = 0.0
    """Of what is added to the residual stream."""


class BlockOutput(NamedTuple):
    """What a layer hands on."""

    x: jax.Array  # [B, T, D]
    cache: Any
    aux: dict[str, jax.Array]


class Block(nn.Module):
    """A mixer, then a feed-forward."""

    config: BlockConfig
    shared: Shared

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        *,
        positions: jax.Array,  # [B, T]
        mask: Mask,
        cache: Any = None,
        keys: jax.Array | None = None,  # [B]
        constants: Any = None,
        want: Want = NOTHING,
    ) -> BlockOutput:
        config, shared = self.config, self.shared
        mixer = mixer_type(config.mixer)(config.mixer, shared, name="mixer")
        mixed = mixer(
            self.before("mixer_norm", x),
            positions=positions,
            mask=mask,
            cache=cache,
            keys=fold(keys, 0),
            constants=constants,
            want=want,
        )
        x = self.after("mixer_norm", x, mixed.y, fold(keys, 1))
        feed_forward = FeedForward(config.feed_forward, shared, name="feed_forward")
        fed = feed_forward(self.before("feed_forward_norm", x), fold(keys, 2))
        x = self.after("feed_forward_norm", x, fed.y, fold(keys, 3))
        return BlockOutput(x, mixed.cache, {**mixed.aux, **fed.aux})

    def before(self, name: str, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        """What a sublayer reads: the norm of the residual stream, or the stream itself."""
        return self.norm(name, x) if self.config.placement == "pre" else x

    def after(
        self,
        name: str,
        x: jax.Array,  # [B, T, D] the residual stream
        y: jax.Array,  # [B, T, D] the sublayer's result
        keys: jax.Array | None,  # [B]
    ) -> jax.Array:  # [B, T, D]
        """The residual stream with the sublayer's result added."""
        x = x + dropout(y, self.config.dropout, keys)
        x = self.norm(name, x) if self.config.placement == "post" else x
        return self.shared.constrain(x, ("batch", "length", None))

    def norm(self, name: str, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        return Norm(self.config.norm, self.shared.precision, name=name)(x)
