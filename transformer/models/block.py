"""One layer: a mixer, optional cross-attention and a feed-forward, each with norm and residual."""

import dataclasses
import functools
from typing import Annotated, Any, Literal, NamedTuple

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Key

from transformer.attention.full import AttentionConfig
from transformer.attention.masks import Mask
from transformer.attention.mixer import (
    MixerConfig,
    MixerInputs,
    apply_mixer,
    explain_mixer_errors,
    mixer_class,
)
from transformer.layers.basic import dropout, fold_in
from transformer.layers.feedforward import FeedForward, FeedForwardConfig, FeedForwardOutput
from transformer.layers.moe import MixtureOfExperts, MoEConfig
from transformer.layers.norms import Norm, NormConfig
from transformer.model_context import ModelContext
from transformer.taps import outputs_within
from transformer.validation import Fraction, Mark, PositiveFloat, Settings

NormPlacement = Literal["pre", "post", "output", "sandwich", "parallel", "parallel_shared"]


@dataclasses.dataclass(frozen=True)
class BlockConfig(Settings):
    """One layer: a mixer, optional cross-attention, and a feed-forward."""

    mixer: Annotated[MixerConfig, Mark.COMMON] = AttentionConfig()
    """Layer that mixes tokens: self-attention, one of its variants, or a recurrent baseline."""
    cross_attention: MixerConfig | None = None
    """Attention to the encoder's output, after the mixer; None in decoder-only models."""
    feed_forward: FeedForwardConfig | MoEConfig | None = FeedForwardConfig()
    """Feed-forward or mixture of experts; None: no feed-forward."""
    norm: NormConfig | None = NormConfig()
    """Norm of each sublayer; None: no norms."""
    mixer_norm: bool = True
    """Apply the norm of the mixer. False in the first layer of ModernBERT, whose input comes
    from a norm."""
    norm_placement: NormPlacement = "pre"
    """`pre`: x + f(norm(x)). `post`: norm(x + f(x)) (Vaswani et al. 2017). `output`:
    x + norm(f(x)) (Liu et al. 2022, Swin v2; OLMo 2). `sandwich`: x + norm(f(norm(x))) (Ding et
    al. 2021). `parallel`: mixer and feed-forward read the same x, each through a norm of its own,
    and both are added to it (GPT-NeoX). `parallel_shared`: both through the norm of the mixer
    (GPT-J: Wang and Komatsuzaki 2021; Chowdhery et al. 2022)."""
    residual: bool = True
    """Add x to the output of each sublayer. False is for ablations: deep stacks hardly train."""
    residual_scale: PositiveFloat = 1.0
    """Factor of each sublayer's output before it is added to the residual stream: 1 / sqrt(L) in
    depth-muP (Yang et al. 2023), Granite's `residual_multiplier`."""
    residual_dropout: Fraction = 0.0
    """Dropout rate of each sublayer's output before it is added to the residual stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.residual and self.norm_placement.startswith("parallel"):
            raise ValueError(
                f"BlockConfig.residual false: with {self.norm_placement} placement the mixer's "
                "output would be lost; set it to true, or norm_placement to pre"
            )
        if not self.mixer_norm and self.norm_placement in ("output", "sandwich", "parallel_shared"):
            raise ValueError(
                f"BlockConfig.mixer_norm false: {self.norm_placement} placement has no norm of the "
                "mixer's input alone; set it to true, or norm_placement to pre"
            )

    @functools.cached_property
    def needs_memory(self) -> bool:
        """True if the layer needs the output of an encoder."""
        return self.cross_attention is not None or self.mixer.reads_memory


class Memory(NamedTuple):
    """Source of cross-attention: an encoder's output and its mask."""

    x: Float[Array, "B S D"] | None  # None if caches already hold its keys and values
    mask: Mask


class BlockCache(NamedTuple):
    """Caches of a layer with cross-attention."""

    mixer: Any
    cross_attention: Any


class BlockConstants(NamedTuple):
    """Non-trainable values of a layer's mixers."""

    mixer: Any = None
    cross_attention: Any = None


def layer_constants(config: BlockConfig, layer_index: int, context: ModelContext) -> BlockConstants:
    """Return the non-trainable values of one layer's mixers, as `Block` takes them."""

    def constants_of(mixer: MixerConfig | None) -> Any:
        if mixer is None:
            return None
        with explain_mixer_errors(mixer):
            return mixer_class(mixer).constants(mixer, layer_index, context.d_model)

    return BlockConstants(constants_of(config.mixer), constants_of(config.cross_attention))


DROPOUT_STREAMS = {
    "mixer": 0,
    "mixer_residual": 1,
    "feed_forward": 2,
    "feed_forward_residual": 3,
    "cross": 4,
    "cross_residual": 5,
}
"""Number of the random stream of each dropout of a layer. Resumed runs rely on them."""


class BlockOutput(NamedTuple):
    """Result of a layer."""

    x: Float[Array, "B T D"]  # residual stream
    cache: Any
    aux: dict[str, Any]  # requested auxiliary outputs; those of cross-attention begin with `cross_`


class Block(nn.Module):
    """One layer. Its submodules are `mixer`, `cross`, `feed_forward` and their norms."""

    config: BlockConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: MixerInputs,  # `constants` of `layer_constants`; with cross-attention a BlockCache
        memory: Memory | None = None,
    ) -> BlockOutput:
        """Apply the layer. ValueError: it has cross-attention, and there is no memory."""
        config, context, taps = self.config, self.context, inputs.taps
        constants = BlockConstants() if inputs.constants is None else inputs.constants
        mixer_cache, cross_cache = inputs.cache, None
        if isinstance(inputs.cache, BlockCache):
            mixer_cache, cross_cache = inputs.cache
        aux: dict[str, Any] = {}

        def rngs(stream: str) -> Key[Array, "B"] | None:
            return fold_in(inputs.dropout_rngs, DROPOUT_STREAMS[stream])

        def tap(name: str, value: jax.Array) -> jax.Array:
            return value if taps is None else taps.visit(name, value, aux)

        x = residual_pre = tap("residual_pre", x)
        mixer = mixer_class(config.mixer)(config.mixer, context, name="mixer")
        mixer_normed = self.pre_norm("mixer", x)
        mixer_inputs = inputs.replace(
            cache=mixer_cache, dropout_rngs=rngs("mixer"), constants=constants.mixer
        )
        if memory is not None and config.mixer.reads_memory:
            mixer_inputs = mixer_inputs.replace(mask=memory.mask, memory=memory.x)
        mixed = apply_mixer(mixer, mixer_normed, mixer_inputs)
        y = tap("mixer_output", mixed.y)
        x = self.add_residual("mixer", x, y, rngs("mixer_residual"))
        cache = mixed.cache
        aux |= mixed.aux

        if config.cross_attention is not None:
            if memory is None:
                raise ValueError(
                    "cross attention: there is no memory (encoder output) to attend to; use "
                    "EncoderDecoder"
                )
            cross_class = mixer_class(config.cross_attention)
            cross = cross_class(config.cross_attention, context, name="cross")
            cross_inputs = inputs.replace(
                mask=memory.mask,
                memory=memory.x,
                cache=cross_cache,
                dropout_rngs=rngs("cross"),
                constants=constants.cross_attention,
                taps=None if taps is None else taps.within("cross_"),
                outputs=outputs_within(inputs.outputs, "cross_"),
            )
            crossed = apply_mixer(cross, self.pre_norm("cross", x), cross_inputs)
            y = tap("cross_output", crossed.y)
            x = self.add_residual("cross", x, y, rngs("cross_residual"))
            cache = cache if cross_cache is None else BlockCache(cache, crossed.cache)
            aux |= {f"cross_{name}": value for name, value in crossed.aux.items()}
        x = tap("residual_mid", x)

        if config.feed_forward is not None:
            match config.norm_placement:
                case "parallel_shared":
                    normed = mixer_normed
                case "parallel":
                    normed = self.pre_norm("feed_forward", residual_pre)
                case _:
                    normed = self.pre_norm("feed_forward", x)
            fed: FeedForwardOutput
            if isinstance(config.feed_forward, MoEConfig):
                experts = MixtureOfExperts(config.feed_forward, context, name="feed_forward")
                segments = inputs.mask.segments
                fed = experts(
                    normed,
                    rngs("feed_forward"),
                    token_mask=None if segments is None else segments != 0,
                    outputs=inputs.outputs,
                )
            else:
                feed_forward = FeedForward(config.feed_forward, context, name="feed_forward")
                fed = feed_forward(normed, rngs("feed_forward"))
            y = tap("feed_forward_output", fed.y)
            x = self.add_residual("feed_forward", x, y, rngs("feed_forward_residual"))
            aux |= fed.aux
        return BlockOutput(tap("residual_post", x), cache, aux)

    def pre_norm(self, sublayer: str, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the input of a sublayer: x, normalized unless its norm follows the sublayer."""
        if self.config.norm_placement in ("post", "output"):
            return x
        return self.apply_norm(f"{sublayer}_norm", x)

    def add_residual(
        self,
        sublayer: str,
        x: Float[Array, "B T D"],  # residual stream
        y: Float[Array, "B T D"],  # output of the sublayer
        dropout_rngs: Key[Array, "B"] | None,
    ) -> Float[Array, "B T D"]:
        """Add a sublayer's output to the residual stream, with dropout and norms."""
        config = self.config
        if config.norm_placement in ("output", "sandwich"):
            y = self.apply_norm(f"{sublayer}_output_norm", y)
        y = dropout(y, config.residual_dropout, dropout_rngs)
        if config.residual_scale != 1:
            y = y * config.residual_scale
        x = x + y if config.residual else y
        if config.norm_placement == "post":
            x = self.apply_norm(f"{sublayer}_norm", x)
        return self.context.constrain(x, ("batch", "length", None))

    def apply_norm(self, name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply the norm `name`; identity if the block has none."""
        if self.config.norm is None or (name == "mixer_norm" and not self.config.mixer_norm):
            return x
        return Norm(self.config.norm, self.context, name=name)(x)
