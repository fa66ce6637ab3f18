"""ModernBERT (Warner et al. 2024): an encoder with RoPE, gated layers and local windows.

Every third layer attends globally, with a larger base of RoPE than the others. The first layer does
not normalize its input, which is the output of the embedding norm.
"""

import dataclasses
from typing import Any

from transformer.interop.bert import HEAD_ACTIVATIONS
from transformer.interop.family import (
    ACTIVATION,
    ACTIVATION_NAMES,
    COMMON,
    D_FF,
    Architecture,
    Family,
    Setting,
    all_blocks,
    linear,
    norm,
    sizes,
    with_blocks,
)
from transformer.interop.fields import Fields
from transformer.interop.llama import with_window
from transformer.interop.rope import read_ropes, write_ropes
from transformer.interop.weight_map import TABLE, Weight
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.norms import NormConfig
from transformer.models.block import BlockConfig
from transformer.models.config import PoolerConfig, TransformerConfig

THETA_NAMES = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}

NORM_PATHS = ("embedding_norm", "layer_pattern.norm", "final_norm")


def _read_layers(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    block: Any = config.layer_pattern[0]
    fields.expect("head_dim", config.d_model // block.mixer.num_heads)
    period = fields.take("global_attn_every_n_layers")
    default = [
        "sliding_attention" if layer % period else "full_attention"
        for layer in range(config.num_layers)
    ]
    kinds = fields.take("layer_types", default)
    window = fields.take("local_attention") // 2
    scaling = dict.fromkeys(THETA_NAMES, fields.take("rope_scaling", {}))
    mixers = {}
    for kind, rope in read_ropes(fields, THETA_NAMES, scaling).items():
        mixer = dataclasses.replace(block.mixer, position=rope)
        # A window of W has the query's own key and W - 1 on each side.
        mixers[kind] = with_window(mixer, window + 1 if kind == "sliding_attention" else 0)
    if unknown := set(kinds) - mixers.keys():
        raise fields.unsupported("layer_types", f"{' and '.join(mixers)}, not {min(unknown)}")
    return with_blocks(
        config,
        [
            dataclasses.replace(block, mixer=mixers[kind], mixer_norm=layer > 0)
            for layer, kind in enumerate(kinds)
        ],
    )


def _write_layers(config: TransformerConfig) -> dict[str, Any]:
    mixers: list[Any] = [block.mixer for block in all_blocks(config)]
    windows = [getattr(mixer, "window", 0) for mixer in mixers]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    ropes = {kind: mixer.position for kind, mixer in zip(kinds, mixers, strict=True)}
    return {
        "layer_types": kinds,
        "local_attention": 2 * (max(windows) - 1) if max(windows) else 128,
        **write_ropes(ropes),
    }


LAYER = "model.layers.{layer}"
PROJECTIONS, GATES = ("query", "key", "value"), ("gate", "up")


def _fused(theirs: str, ours: str, names: tuple[str, ...]) -> tuple[Weight, Weight]:
    """Return the rules of matrices side by side, and of their biases."""
    return (
        Weight(f"{theirs}.weight", tuple(f"{ours}/{name}" for name in names)),
        Weight(f"{theirs}.bias", tuple(f"{ours}/{name}_bias" for name in names)),
    )


def _pooler(config: TransformerConfig) -> PoolerConfig:
    """Return the layer before a classifier: that of the masked-token head."""
    return PoolerConfig(config.masked_head.activation, config.masked_head.bias, config.final_norm)


CLASSIFIER = (
    *linear("head.dense", "pooler"),
    *norm("head.norm", "pooler_norm"),
    *linear("classifier", "head"),
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
        Architecture(
            "ModernBertForSequenceClassification",
            "classifier",
            CLASSIFIER,
            pooler=_pooler,
            pooling=Setting(
                "classifier_pooling", "pooling", choices={"cls": "first", "mean": "mean"}
            ),
        ),
        Architecture("ModernBertForTokenClassification", "tagger", CLASSIFIER, pooler=_pooler),
        Architecture(
            "ModernBertForQuestionAnswering", "question_answering", CLASSIFIER, pooler=_pooler
        ),
    ),
    base=TransformerConfig(
        layer_pattern=(BlockConfig(feed_forward=FeedForwardConfig(gated=True)),),
        embedding_norm=NormConfig(),
        causal=False,
    ),
    settings=(
        *COMMON,
        *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
        Setting("intermediate_size", D_FF, is_size=True),
        Setting("hidden_activation", ACTIVATION, choices=ACTIVATION_NAMES),
        Setting("norm_eps", tuple(f"{path}.epsilon" for path in NORM_PATHS)),
        Setting("norm_bias", tuple(f"{path}.bias" for path in NORM_PATHS)),
        Setting("attention_bias", "layer_pattern.mixer.bias"),
        Setting("attention_dropout", "layer_pattern.mixer.dropout"),
        Setting("mlp_bias", "layer_pattern.feed_forward.bias"),
        Setting("mlp_dropout", "layer_pattern.feed_forward.dropout"),
        Setting("embedding_dropout", "embedding_dropout"),
        Setting("classifier_activation", "masked_head.activation", choices=HEAD_ACTIVATIONS),
        Setting("classifier_bias", "masked_head.bias"),
        Setting("decoder_bias", "masked_head.output_bias"),
    ),
    weights=(
        Weight("model.embeddings.tok_embeddings.weight", "embedding", TABLE),
        *norm("model.embeddings.norm", "embedding_norm"),
        *norm(f"{LAYER}.attn_norm", "layers/mixer_norm"),
        *_fused(f"{LAYER}.attn.Wqkv", "layers/mixer", PROJECTIONS),
        *linear(f"{LAYER}.attn.Wo", "layers/mixer/output"),
        *norm(f"{LAYER}.mlp_norm", "layers/feed_forward_norm"),
        *_fused(f"{LAYER}.mlp.Wi", "layers/feed_forward", GATES),
        *linear(f"{LAYER}.mlp.Wo", "layers/feed_forward/down"),
        *norm("model.final_norm", "final_norm"),
    ),
    expected={"is_causal": (False,)},
    # The defaults may be beyond the vocabulary.
    constants={"pad_token_id": None, "cls_token_id": None, "sep_token_id": None},
    read_rest=_read_layers,
    write_rest=_write_layers,
    prefix="model.",
)
