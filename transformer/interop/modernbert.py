"""ModernBERT (Warner et al. 2024): an encoder with RoPE, gated layers and local windows.

Every third layer attends globally, with a larger base of RoPE than the others. The first layer does
not normalize its input, which is the output of the embedding norm.
"""

import dataclasses
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.interop.bert import HEAD_ACTIVATIONS
from transformer.interop.family import (
    ACTIVATION_NAMES,
    Architecture,
    Family,
    activation_name,
    linear,
    norm,
    read_ropes,
    shortest_period,
    write_ropes,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import with_window
from transformer.interop.weight_map import TABLE, Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.models.block import BlockConfig
from transformer.models.config import MaskedHeadConfig, TransformerConfig

THETA_NAMES = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def _read_modernbert(fields: Fields) -> TransformerConfig:
    fields.expect("is_causal", False)
    depth = fields.size("num_hidden_layers")
    period = fields.take("global_attn_every_n_layers")
    default = [
        "sliding_attention" if layer % period else "full_attention" for layer in range(depth)
    ]
    kinds = fields.take("layer_types", default)
    window = fields.take("local_attention") // 2
    layer_norm = NormConfig(epsilon=fields.take("norm_eps"), bias=fields.take("norm_bias"))
    d_model, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    fields.expect("head_dim", d_model // num_heads)
    attention = AttentionConfig(
        num_heads=num_heads,
        bias=fields.take("attention_bias"),
        dropout=fields.take("attention_dropout"),
    )
    scaling = fields.take("rope_scaling", {})
    mixers = {}
    for kind, rope in read_ropes(fields, THETA_NAMES, dict.fromkeys(THETA_NAMES, scaling)).items():
        mixer = dataclasses.replace(attention, position=rope)
        # A window of W has the query's own key and W - 1 on each side.
        mixers[kind] = with_window(mixer, window + 1 if kind == "sliding_attention" else 0)
    if unknown := set(kinds) - mixers.keys():
        raise fields.unsupported("layer_types", f"{' and '.join(mixers)}, not {min(unknown)}")
    feed_forward = FeedForwardConfig(
        d_ff=fields.size("intermediate_size"),
        activation=fields.choose("hidden_activation", ACTIVATION_NAMES),
        gated=True,
        bias=fields.take("mlp_bias"),
        dropout=fields.take("mlp_dropout"),
    )
    blocks = [
        BlockConfig(
            mixer=mixers[kind], feed_forward=feed_forward, norm=layer_norm, mixer_norm=layer > 0
        )
        for layer, kind in enumerate(kinds)
    ]
    return TransformerConfig(
        vocab_size=fields.size("vocab_size"),
        d_model=d_model,
        num_layers=depth,
        layer_pattern=shortest_period(blocks),
        embedding_norm=layer_norm,
        embedding_dropout=fields.take("embedding_dropout"),
        causal=False,
        final_norm=layer_norm,
        masked_head=MaskedHeadConfig(
            activation=fields.choose("classifier_activation", HEAD_ACTIVATIONS),
            bias=fields.take("classifier_bias"),
            output_bias=fields.take("decoder_bias"),
        ),
        tie_embeddings=fields.take("tie_word_embeddings"),
    )


def _write_modernbert(config: TransformerConfig) -> dict[str, Any]:
    pattern: Any = config.layer_pattern
    block = pattern[0]
    mixers = [pattern[layer % len(pattern)].mixer for layer in range(config.num_layers)]
    windows = [getattr(mixer, "window", 0) for mixer in mixers]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    ropes = {kind: mixer.position for kind, mixer in zip(kinds, mixers, strict=True)}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": block.mixer.num_heads,
        "intermediate_size": block.feed_forward.d_ff,
        "hidden_activation": activation_name(block.feed_forward.activation),
        "norm_eps": block.norm.epsilon,
        "norm_bias": block.norm.bias,
        "attention_bias": block.mixer.bias,
        "attention_dropout": block.mixer.dropout,
        "mlp_bias": block.feed_forward.bias,
        "mlp_dropout": block.feed_forward.dropout,
        "embedding_dropout": config.embedding_dropout,
        "layer_types": kinds,
        "local_attention": 2 * (max(windows) - 1) if max(windows) else 128,
        **write_ropes(ropes),
        "classifier_activation": activation_name(config.masked_head.activation),
        "classifier_bias": config.masked_head.bias,
        "decoder_bias": config.masked_head.output_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,  # the defaults may be beyond the vocabulary
        "cls_token_id": None,
        "sep_token_id": None,
    }


LAYER = "model.layers.{layer}"
QKV, GATES = ("query", "key", "value"), ("gate", "up")


def _fused(theirs: str, ours: str, names: tuple[str, ...]) -> tuple[Weight, Weight]:
    """Return the rules of matrices side by side, and of their biases."""
    return (
        Weight(f"{theirs}.weight", tuple(f"{ours}/{name}" for name in names)),
        Weight(f"{theirs}.bias", tuple(f"{ours}/{name}_bias" for name in names)),
    )


MODERNBERT = Family(
    "modernbert",
    (
        Architecture(
            "ModernBertForMaskedLM",
            "masked_lm",
            (
                *linear("head.dense", "head"),
                *norm("head.norm", "head_norm"),
                Weight("decoder.weight", "output"),
                Weight("decoder.bias", "head_output_bias"),
            ),
        ),
    ),
    _read_modernbert,
    _write_modernbert,
    (
        Weight("model.embeddings.tok_embeddings.weight", "embedding", TABLE),
        *norm("model.embeddings.norm", "embedding_norm"),
        *norm(f"{LAYER}.attn_norm", "layers/mixer_norm"),
        *_fused(f"{LAYER}.attn.Wqkv", "layers/mixer", QKV),
        *linear(f"{LAYER}.attn.Wo", "layers/mixer/output"),
        *norm(f"{LAYER}.mlp_norm", "layers/feed_forward_norm"),
        *_fused(f"{LAYER}.mlp.Wi", "layers/feed_forward", GATES),
        *linear(f"{LAYER}.mlp.Wo", "layers/feed_forward/down"),
        *norm("model.final_norm", "final_norm"),
    ),
    prefix="model.",
)
