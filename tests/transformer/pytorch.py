"""PyTorch's own transformer modules in this library's terms: configurations and weights."""

from typing import Any

from tests.fixtures.tiny import Sizes
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
    NormConfig,
    TransformerConfig,
)
from transformer.models.block import NormPlacement


def block_config(sizes: Sizes, placement: NormPlacement, *, cross: bool = False) -> BlockConfig:
    """Return `nn.TransformerEncoderLayer`, or with `cross` attention
    `nn.TransformerDecoderLayer`.
    """
    mixer = AttentionConfig(num_heads=sizes.heads)
    return BlockConfig(
        mixer=mixer,
        cross_attention=mixer if cross else None,
        feed_forward=FeedForwardConfig(d_ff=sizes.hidden, activation="relu"),
        norm=NormConfig(epsilon=sizes.epsilon),
        norm_placement=placement,
    )


def causal_config(sizes: Sizes, placement: NormPlacement) -> TransformerConfig:
    """Return `nn.TransformerEncoder` with a triangular mask, and a final norm if layers are
    pre-norm.

    PyTorch's modules start from embedded tokens, so there are no positions.
    """
    last = NormConfig(epsilon=sizes.epsilon) if placement == "pre" else None
    return TransformerConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.width,
        num_layers=sizes.layers,
        layer_pattern=(block_config(sizes, placement),),
        final_norm=last,
        pad_vocab_to_multiple=1,
    )


def transformer_config(sizes: Sizes, placement: NormPlacement) -> TransformerConfig:
    """Return `nn.Transformer`; each of its stacks ends with a norm."""
    last = NormConfig(epsilon=sizes.epsilon)
    return TransformerConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.width,
        num_layers=sizes.layers,
        layer_pattern=(block_config(sizes, placement, cross=True),),
        final_norm=last,
        encoder=EncoderConfig(sizes.source_layers, (block_config(sizes, placement),), last),
        pad_vocab_to_multiple=1,
    )


def causal_params(read: Read, sizes: Sizes, placement: NormPlacement) -> Params:
    """Return the parameters of `causal_config`."""
    params = stack(read, "causal", sizes, sizes.layers, last=placement == "pre")
    return params | {"embedding": read("embedding", (sizes.vocab, sizes.width))}


def transformer_params(read: Read, sizes: Sizes, placement: NormPlacement) -> Params:
    """Return the parameters of `transformer_config`, which are the same for both placements."""
    at = "transformer"
    return {
        "embedding": read("embedding", (sizes.vocab, sizes.width)),
        "encoder": stack(read, f"{at}.encoder", sizes, sizes.source_layers, last=True),
        "decoder": stack(read, f"{at}.decoder", sizes, sizes.layers, last=True, cross=True),
    }


def stack(
    read: Read, at: str, sizes: Sizes, layers: int, *, last: bool, cross: bool = False
) -> Params:
    """Return the layers and the norm after them."""
    each = [layer(read, f"{at}.layers.{number}", sizes, cross) for number in range(layers)]
    params: Params = {"layers": {"place_0": stacked(each)}}
    return params | {"final_norm": layer_norm(read, f"{at}.norm", sizes.width)} if last else params


def layer(read: Read, at: str, sizes: Sizes, cross: bool) -> Params:
    """Return one layer; its norms are numbered in the order of its sublayers."""
    d, f = sizes.width, sizes.hidden
    sublayers: dict[str, Any] = {"mixer": joined_attention(read, f"{at}.self_attn", sizes)}
    if cross:
        sublayers["cross"] = joined_attention(read, f"{at}.multihead_attn", sizes)
    up, down = linear(read, f"{at}.linear1", d, f), linear(read, f"{at}.linear2", f, d)
    sublayers["feed_forward"] = feed_forward(up, down)
    norms = {
        f"{name}_norm": layer_norm(read, f"{at}.norm{number}", d)
        for number, name in enumerate(sublayers, start=1)
    }
    return sublayers | norms


def joined_attention(read: Read, at: str, sizes: Sizes) -> Params:
    """Read an `nn.MultiheadAttention`, whose query, key and value are rows of one matrix."""
    d = sizes.width
    matrix = read(f"{at}.in_proj_weight", (3 * d, d)).reshape(3, d, d)
    bias = read(f"{at}.in_proj_bias", (3 * d,)).reshape(3, d)
    inner = [(matrix[i].T, bias[i]) for i in range(3)]
    return attention(inner, linear(read, f"{at}.out_proj", d, d), sizes.heads)
