"""GPT-2 and Llama in this library: configurations, and weights from Hugging Face.

`read(name, shape)` returns a weight by its Hugging Face name.
"""

import numpy as np

from tests.fixtures.tiny import Array, Sizes
from tests.transformer.layouts import Params, Read, layer_norm, stacked
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LearnedPositions,
    NormConfig,
    RoPE,
    TransformerConfig,
)


def gpt2_config(sizes: Sizes, vocab_multiple: int = 1) -> TransformerConfig:
    norm = NormConfig(epsilon=sizes.epsilon)
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=sizes.heads),
        feed_forward=FeedForwardConfig(d_ff=sizes.hidden, activation="gelu_tanh"),
        norm=norm,
    )
    return TransformerConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.width,
        num_layers=sizes.layers,
        layer_pattern=(block,),
        position_embedding=LearnedPositions(sizes.length),
        tie_embeddings=True,
        final_norm=norm,
        pad_vocab_to_multiple=vocab_multiple,
    )


def llama_config(sizes: Sizes, vocab_multiple: int = 1) -> TransformerConfig:
    norm = NormConfig("rms", epsilon=sizes.epsilon)
    block = BlockConfig(
        mixer=AttentionConfig(
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_width,
            bias=False,
            position=RoPE(theta=sizes.rotary_base, layout="halves"),
        ),
        feed_forward=FeedForwardConfig(
            d_ff=sizes.hidden, activation="silu", gated=True, bias=False
        ),
        norm=norm,
    )
    return TransformerConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.width,
        num_layers=sizes.layers,
        layer_pattern=(block,),
        tie_embeddings=False,
        final_norm=norm,
        pad_vocab_to_multiple=vocab_multiple,
    )


def gpt2_params(read: Read, sizes: Sizes, rows: int) -> Params:
    """Return the parameters; the embedding gets `rows` rows, with zeros after the vocabulary."""
    d = sizes.width
    embedding = read("transformer.wte.weight", (sizes.vocab, d))
    layers = [gpt2_layer(read, sizes, layer) for layer in range(sizes.layers)]
    return {
        "embedding": np.pad(embedding, [(0, rows - sizes.vocab), (0, 0)]),
        "positions": read("transformer.wpe.weight", (sizes.length, d)),
        "layers": {"place_0": stacked(layers)},
        "final_norm": layer_norm(read, "transformer.ln_f", d),
    }


def gpt2_layer(read: Read, sizes: Sizes, layer: int) -> Params:
    """Return one layer. Matrices are [inputs, outputs]; query, key and value are columns of one."""
    d, f, heads = sizes.width, sizes.hidden, (sizes.heads, sizes.head_width)
    at = f"transformer.h.{layer}"
    joined = read(f"{at}.attn.c_attn.weight", (d, 3 * d)).reshape(d, 3, *heads)
    joined_bias = read(f"{at}.attn.c_attn.bias", (3 * d,)).reshape(3, *heads)
    return {
        "mixer_norm": layer_norm(read, f"{at}.ln_1", d),
        "mixer": {
            "query": joined[:, 0],
            "query_bias": joined_bias[0],
            "key": joined[:, 1],
            "key_bias": joined_bias[1],
            "value": joined[:, 2],
            "value_bias": joined_bias[2],
            "output": read(f"{at}.attn.c_proj.weight", (d, d)).reshape(*heads, d),
            "output_bias": read(f"{at}.attn.c_proj.bias", (d,)),
        },
        "feed_forward_norm": layer_norm(read, f"{at}.ln_2", d),
        "feed_forward": {
            "up": read(f"{at}.mlp.c_fc.weight", (d, f)),
            "up_bias": read(f"{at}.mlp.c_fc.bias", (f,)),
            "down": read(f"{at}.mlp.c_proj.weight", (f, d)),
            "down_bias": read(f"{at}.mlp.c_proj.bias", (d,)),
        },
    }


def llama_params(read: Read, sizes: Sizes, rows: int) -> Params:
    """Return the parameters; embedding and output get `rows` rows, with zeros after the
    vocabulary.
    """
    shape, padding = (sizes.vocab, sizes.width), [(0, rows - sizes.vocab), (0, 0)]
    layers = [llama_layer(read, sizes, layer) for layer in range(sizes.layers)]
    return {
        "embedding": np.pad(read("model.embed_tokens.weight", shape), padding),
        "layers": {"place_0": stacked(layers)},
        "final_norm": {"gain": read("model.norm.weight", (sizes.width,))},
        "output": np.pad(read("lm_head.weight", shape), padding).T,
    }


def llama_layer(read: Read, sizes: Sizes, layer: int) -> Params:
    """Return one layer. Matrices are [outputs, inputs]."""
    d, f, h = sizes.width, sizes.hidden, sizes.head_width
    at = f"model.layers.{layer}"

    def transposed(name: str, inputs: int, outputs: int) -> Array:  # [inputs, outputs]
        return read(f"{at}.{name}.weight", (outputs, inputs)).T

    def heads(name: str, count: int) -> Array:  # [D, count, H]
        return transposed(f"self_attn.{name}", d, count * h).reshape(d, count, h)

    output = transposed("self_attn.o_proj", sizes.heads * h, d)
    return {
        "mixer_norm": {"gain": read(f"{at}.input_layernorm.weight", (d,))},
        "mixer": {
            "query": heads("q_proj", sizes.heads),
            "key": heads("k_proj", sizes.kv_heads),
            "value": heads("v_proj", sizes.kv_heads),
            "output": output.reshape(sizes.heads, h, d),
        },
        "feed_forward_norm": {"gain": read(f"{at}.post_attention_layernorm.weight", (d,))},
        "feed_forward": {
            "gate": transposed("mlp.gate_proj", d, f),
            "up": transposed("mlp.up_proj", d, f),
            "down": transposed("mlp.down_proj", f, d),
        },
    }
