"""Marian in this library: its configuration, and its weights from Hugging Face.

`read(name, shape)` returns a weight by its Hugging Face name.
"""

import jax.numpy as jnp
import numpy as np

from tests.fixtures.tiny import Array, Sizes
from tests.transformer.layouts import (
    Params,
    Read,
    attention,
    feed_forward,
    layer_norm,
    linear,
    stacked,
)
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    FeedForwardConfig,
    LearnedPositions,
    NormConfig,
    TransformerConfig,
)
from transformer.layers.position_embedding import sinusoidal_embedding


def marian_config(sizes: Sizes, *, tied: bool) -> TransformerConfig:
    """Return the configuration.

    Marian's sinusoids are not interleaved, so they are stored as learned positions.
    """
    return TransformerConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.width,
        num_layers=sizes.layers,
        layer_pattern=(block_config(sizes, cross=True),),
        position_embedding=LearnedPositions(sizes.length),
        scale_embeddings=True,
        encoder=EncoderConfig(
            num_layers=sizes.source_layers,
            layer_pattern=(block_config(sizes, cross=False),),
            final_norm=None,
            vocab_size=0 if tied else sizes.vocab,
        ),
        tie_embeddings=tied,
        final_norm=None,
        pad_vocab_to_multiple=1,
    )


def block_config(sizes: Sizes, *, cross: bool) -> BlockConfig:
    mixer = AttentionConfig(num_heads=sizes.heads)
    return BlockConfig(
        mixer=mixer,
        cross_attention=mixer if cross else None,
        feed_forward=FeedForwardConfig(d_ff=sizes.hidden, activation="silu"),
        norm=NormConfig(epsilon=sizes.epsilon),
        norm_placement="post",
    )


def marian_params(read: Read, sizes: Sizes, *, tied: bool) -> Params:
    """Return the parameters: one embedding table for all uses, or three."""
    shape = (sizes.vocab, sizes.width)
    stacks = {
        "encoder": stack(read, "encoder", sizes, sizes.source_layers, cross=False),
        "decoder": stack(read, "decoder", sizes, sizes.layers, cross=True),
    }
    if tied:
        return stacks | {"embedding": read("model.shared.weight", shape)}
    return stacks | {
        "source_embedding": read("model.encoder.embed_tokens.weight", shape),
        "embedding": read("model.decoder.embed_tokens.weight", shape),
        "output": read("lm_head.weight", shape).T,
    }


def stack(read: Read, name: str, sizes: Sizes, layers: int, *, cross: bool) -> Params:
    at = f"model.{name}.layers"
    each = [layer(read, f"{at}.{number}", sizes, cross) for number in range(layers)]
    return {"positions": positions(sizes), "layers": {"place_0": stacked(each)}}


def positions(sizes: Sizes) -> Array:  # [length, D]
    """Return all sines, then all cosines."""
    table = np.asarray(sinusoidal_embedding(jnp.arange(sizes.length)[None], sizes.width))[0]
    return np.concatenate([table[:, 0::2], table[:, 1::2]], axis=1)


def layer(read: Read, at: str, sizes: Sizes, cross: bool) -> Params:
    d, f = sizes.width, sizes.hidden
    params = sublayer(read, at, "mixer", "self_attn", sizes)
    if cross:
        params |= sublayer(read, at, "cross", "encoder_attn", sizes)
    up, down = linear(read, f"{at}.fc1", d, f), linear(read, f"{at}.fc2", f, d)
    return params | {
        "feed_forward": feed_forward(up, down),
        "feed_forward_norm": layer_norm(read, f"{at}.final_layer_norm", d),
    }


def sublayer(read: Read, at: str, name_here: str, hf_name: str, sizes: Sizes) -> Params:
    """Return the parameters of attention and its norm."""
    d = sizes.width
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    *inner, output = (linear(read, f"{at}.{hf_name}.{name}", d, d) for name in names)
    return {
        name_here: attention(inner, output, sizes.heads),
        f"{name_here}_norm": layer_norm(read, f"{at}.{hf_name}_layer_norm", d),
    }
