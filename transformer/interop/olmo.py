"""OLMo 2, OLMo 3 and EXAONE 4: Llama's layout with norms of the sublayers' outputs.

    x + norm(f(x))

OLMo (Walsh et al. 2025) normalizes all heads of queries and keys as one vector. OLMo 3 has layers
with a window, whose RoPE is never scaled. EXAONE 4 (LG AI Research 2025) normalizes each head; if
it has a window at all, layers without one have no positions.
"""

import dataclasses
from typing import Any

from transformer.attention.rope import RoPE
from transformer.interop.family import decoder_classes, norm, with_settings
from transformer.interop.fields import CONFIG_FIELDS, Fields
from transformer.interop.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_SIZES,
    ENDS,
    FEED_FORWARD,
    GATED,
    LAYER,
    LLAMA,
    QK_EPSILON,
    QK_NORMS,
    RMS,
    kinds_by_period,
    read_windows,
    write_layer_ropes,
    write_windows,
)
from transformer.interop.rope import read_ropes
from transformer.layers.position_embedding import NO_POSITION
from transformer.models.config import TransformerConfig

WEIGHTS = (
    *ENDS,
    *norm(f"{LAYER}.post_attention_layernorm", "layers/mixer_output_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", "layers/feed_forward_output_norm"),
    *ATTENTION,
    *QK_NORMS,
    *GATED,
)

OLMO2 = dataclasses.replace(
    LLAMA,
    model_type="olmo2",
    architectures=decoder_classes("Olmo2"),
    base=with_settings(
        LLAMA.base,
        {
            "layer_pattern.norm_placement": "output",
            "layer_pattern.mixer.qk_norm": RMS,
            "layer_pattern.mixer.qk_norm_heads": "joint",
        },
    ),
    settings=(*DECODER, ATTENTION_BIAS, QK_EPSILON),
    weights=WEIGHTS,
)


def _read_olmo3(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    scaling = {"full_attention": fields.take("rope_scaling", {})}
    parameters = fields.take("rope_parameters", {}).get("sliding_attention") or {}
    if "rope_theta" not in parameters:  # the field of transformers 4 is that of full layers alone
        theta = CONFIG_FIELDS["olmo3"].defaults["rope_theta"]
        scaling["sliding_attention"] = {"rope_theta": theta}
    names = dict.fromkeys(("full_attention", "sliding_attention"), "rope_theta")
    ropes = read_ropes(fields, names, scaling)
    attention: Any = config.layer_pattern[0].mixer
    everywhere = dataclasses.replace(attention, position=ropes["full_attention"])
    local = dataclasses.replace(attention, position=ropes["sliding_attention"])
    window = fields.take("sliding_window", 0)
    return read_windows(fields, config, kinds_by_period(config, 4), window, everywhere, local)


def _write_olmo3(config: TransformerConfig) -> dict[str, Any]:
    default = RoPE(theta=500_000.0)
    return write_windows(config) | write_layer_ropes(config, default, default)


OLMO3 = dataclasses.replace(
    OLMO2,
    model_type="olmo3",
    architectures=decoder_classes("Olmo3"),
    settings=(*DECODER_SIZES, *FEED_FORWARD, ATTENTION_BIAS, QK_EPSILON),
    read_rest=_read_olmo3,
    write_rest=_write_olmo3,
)


def _read_exaone4(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    window = fields.take("sliding_window", 0)
    kinds = ["full_attention"] * config.num_layers
    if window and "layer_types" not in fields:
        kinds = kinds_by_period(config, fields.take("sliding_window_pattern"))
    attention: Any = config.layer_pattern[0].mixer
    everywhere = dataclasses.replace(attention, position=NO_POSITION) if window else attention
    return read_windows(fields, config, kinds, window, everywhere, attention)


def _write_exaone4(config: TransformerConfig) -> dict[str, Any]:
    fields = write_windows(config)
    if isinstance(getattr(config.layer_pattern[0].mixer, "position", None), RoPE):
        fields = {"sliding_window": None} | fields
    return fields


EXAONE4 = dataclasses.replace(
    OLMO2,
    model_type="exaone4",
    architectures=decoder_classes("Exaone4"),
    base=with_settings(OLMO2.base, {"layer_pattern.mixer.qk_norm_heads": "shared"}),
    settings=(*DECODER, QK_EPSILON),
    read_rest=_read_exaone4,
    write_rest=_write_exaone4,
)
