"""Cross-attention of a layer: the decoder attends to an encoder's output (the memory)."""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from transformer.attention.masks import Mask
from transformer.attention.mixer import MixerInputs, MixerOutput, mixer_class

if TYPE_CHECKING:  # block.py imports this module
    from transformer.layers.block import Block


class Memory(NamedTuple):
    """Source of cross-attention: an encoder's output and its mask."""

    x: jax.Array | None  # [B, S, D]; None if caches already hold its keys and values
    mask: Mask


class BlockCache(NamedTuple):
    """Caches of a layer with cross-attention."""

    mixer: Any
    cross_attention: Any


class BlockConstants(NamedTuple):
    """Constants of a layer with cross-attention."""

    mixer: Any
    cross_attention: Any


def add_cross_attention(
    block: "Block",
    x: jax.Array,  # [B, T, D] residual stream
    inputs: MixerInputs,  # with the cache and the constants of the cross-attention
    memory: Memory | None,
    attention_rngs: jax.Array | None,  # [B]
    residual_rngs: jax.Array | None,  # [B]
) -> tuple[jax.Array, MixerOutput]:  # [B, T, D]
    """Apply the sublayer `cross` of a block; return the residual stream and the mixer's output.

    Raises:
      ValueError: If there is no memory.
    """
    if memory is None:
        raise ValueError(
            "cross attention: there is no memory (encoder output) to attend to; use EncoderDecoder"
        )
    config = block.config.cross_attention
    assert config is not None  # checked by the block
    mixer = mixer_class(config)(config, block.context, name="cross")
    crossed = mixer(
        block.pre_norm("cross_norm", x),
        inputs.replace(
            mask=memory.mask,
            memory=memory.x,
            dropout_rngs=attention_rngs,
            taps=None if inputs.taps is None else inputs.taps.within("cross_"),
        ),
    )
    return block.add_residual("cross_norm", x, crossed.y, residual_rngs), crossed
