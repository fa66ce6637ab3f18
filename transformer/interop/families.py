"""All families: which one a config.json belongs to, and which one can express a model."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from transformer.attention.full import AttentionConfig
from transformer.attention.projections import MultiHeadConfig
from transformer.attention.scores import ScaledDotScore
from transformer.attention.variants.gated_delta import GatedDeltaConfig
from transformer.attention.variants.latent_attention import LatentAttentionConfig
from transformer.attention.variants.mamba2 import Mamba2Config
from transformer.interop.bert import (
    ALBERT,
    BERT,
    BIG_BIRD,
    CAMEMBERT,
    DISTILBERT,
    ELECTRA,
    LONGFORMER,
    MPNET,
    ROBERTA,
    XLM_ROBERTA,
)
from transformer.interop.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from transformer.interop.family import Architecture, Family, ModelKind
from transformer.interop.fields import CONFIG_FIELDS, Fields, InteropError
from transformer.interop.gpt import BLOOM, GPT2, GPT_NEO, GPT_NEOX, MPT, OPT
from transformer.interop.layer_norm_decoders import NEMOTRON, STABLELM, STARCODER2
from transformer.interop.llama import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM4,
    GPT_OSS,
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from transformer.interop.modernbert import MODERNBERT
from transformer.interop.multimodal import MULTIMODAL
from transformer.interop.olmo import EXAONE4, OLMO2, OLMO3
from transformer.interop.parallel import COHERE, COHERE2, FALCON, GPTJ, PHI
from transformer.interop.qwen_moe import QWEN2_MOE, QWEN3_MOE
from transformer.interop.recurrences import MAMBA2, QWEN3_NEXT
from transformer.interop.seq2seq import (
    BART,
    LED,
    M2M_100,
    MARIAN,
    MBART,
    MT5,
    PEGASUS,
    T5,
    UMT5,
)
from transformer.interop.weight_map import model_leaves, model_tensors
from transformer.layers.feedforward import FeedForwardConfig, resolve_d_ff
from transformer.layers.norms import NormConfig
from transformer.models.config import EncoderConfig, TransformerConfig
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.heads import Classifier, QuestionAnswerer, Tagger
from transformer.models.language_model import LanguageModel
from transformer.models.masked_lm import MaskedLanguageModel
from transformer.models.model import Model

MODELS: dict[ModelKind, Any] = {
    "language_model": LanguageModel,
    "masked_lm": MaskedLanguageModel,
    "classifier": Classifier,
    "tagger": Tagger,
    "question_answering": QuestionAnswerer,
    "encoder_decoder": EncoderDecoder,
}
"""Models of this library by the kind of an architecture."""

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        GPT2,
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        PHI3,
        GPT_OSS,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GPT_NEOX,
        BLOOM,
        OPT,
        STARCODER2,
        SMOLLM3,
        GRANITE,
        OLMO2,
        OLMO3,
        NEMOTRON,
        STABLELM,
        QWEN3_MOE,
        QWEN2_MOE,
        QWEN3_NEXT,
        MAMBA2,
        EXAONE4,
        GPTJ,
        PHI,
        FALCON,
        COHERE,
        COHERE2,
        GPT_NEO,
        MPT,
        GLM4,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        BERT,
        ROBERTA,
        XLM_ROBERTA,
        CAMEMBERT,
        MPNET,
        ELECTRA,
        ALBERT,
        DISTILBERT,
        MODERNBERT,
        LONGFORMER,
        BIG_BIRD,
        T5,
        MT5,
        UMT5,
        BART,
        MBART,
        M2M_100,
        PEGASUS,
        MARIAN,
        LED,
    )
}
"""Families in the order in which `export` tries them for a model without a family of its own."""


REFUSED = {
    "mamba": "it is the first Mamba, whose states have a decay for each entry; known is mamba2",
    "ministral3": "its queries grow with their positions (llama_4_scaling_beta)",
}
"""Architectures that are asked for and not supported, with the reason."""


def find_architecture(
    model_type: object, names: object, source: str
) -> tuple[Family, Architecture, str]:
    """Return the family and the architecture of a config.json, and the class if it is another.

    Of a class with another head, such as `BertModel`, the body is known: it is read as the first
    architecture of the family.

    Raises:
      InteropError: They are unknown; the message lists those that are known.
    """
    model_type = model_type if isinstance(model_type, str) else ""
    family = FAMILIES.get(model_type)
    if family is None:
        reason = f" ({REFUSED[model_type]})" if model_type in REFUSED else ""
        raise InteropError(
            f"{source}: model_type {model_type!r} is not supported{reason}; known are "
            f"{', '.join([*FAMILIES, *MULTIMODAL])}"
        )
    names = [names] if isinstance(names, str) else names
    asked = names if isinstance(names, list) and names else [family.architectures[0].name]
    for architecture in family.architectures:
        if architecture.name in asked:
            return family, architecture, ""
    for name in asked:
        if name in CONFIG_FIELDS[model_type].classes:
            return family, family.architectures[0], name
    known = ", ".join(architecture.name for architecture in family.architectures)
    raise InteropError(
        f"{source}: architectures {asked} are not supported; known for {model_type} are {known}"
    )


RUN_SETTINGS = frozenset(
    [
        *("backend", "dispatcher", "layer_loop", "remat", "precision", "pad_vocab_to_multiple"),
        *("dropout", "residual_dropout", "embedding_dropout", "initialization"),
        *("load_balance_loss_weight", "router_z_loss_weight"),
        *("pooler", "pooler_layer"),  # of the architecture
    ]
)
"""Settings that change how a model is trained or run, but not what it computes."""


def find_difference(config: TransformerConfig, other: TransformerConfig) -> str | None:
    """Return the first setting in which two models differ, with both values; None if in none.

    The defaults of both have to be filled in.
    """
    ours, theirs = dict(_settings("model", config)), dict(_settings("model", other))
    for name, value in ours.items():
        if name not in theirs or value != theirs[name]:
            return f"{name} {value!r} (it has {theirs.get(name, 'none')!r})"
    return None


def fill_in(part: Any, d_model: int) -> Any:
    """Return a part of a config with the defaults that depend on the width of the model."""
    if isinstance(part, tuple):
        return tuple(fill_in(value, d_model) for value in part)
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    if isinstance(part, LatentAttentionConfig):
        part = part.resolve(d_model)
    values = {
        field.name: fill_in(getattr(part, field.name), d_model)
        for field in dataclasses.fields(part)
    }
    if isinstance(part, MultiHeadConfig):
        head_dim = part.resolved_head_dim(d_model)
        values |= {"num_kv_heads": part.resolved_num_kv_heads, "head_dim": head_dim}
        values |= {"output_bias": part.has_output_bias}
        if isinstance(part, AttentionConfig):
            values["value_head_dim"] = part.value_head_dim or head_dim
        if values.get("score") == ScaledDotScore():
            values["score"] = ScaledDotScore(float(head_dim))
    if isinstance(part, GatedDeltaConfig):
        values |= {"num_key_heads": part.resolved_num_key_heads}
        values |= {"value_head_dim": part.resolved_value_head_dim(d_model)}
    if isinstance(part, GatedDeltaConfig | Mamba2Config):
        values["head_dim"] = part.resolved_head_dim(d_model)
    if isinstance(part, FeedForwardConfig):
        values["d_ff"] = resolve_d_ff(part, d_model)
    if isinstance(part, NormConfig) and not part.is_centered:  # it has no bias
        values["bias"] = True
    return dataclasses.replace(part, **values)


def _settings(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a model by path, with every layer by itself.

    The class of a part precedes its settings.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        yield path, value
        return
    yield path, type(value).__name__
    for field in dataclasses.fields(value):
        setting, name = getattr(value, field.name), f"{path}.{field.name}"
        if isinstance(value, TransformerConfig | EncoderConfig) and field.name == "layer_pattern":
            for layer in range(value.num_layers):
                yield from _settings(f"{name}.{layer}", setting[layer % len(setting)])
        elif field.name not in RUN_SETTINGS:
            yield from _settings(name, setting)


def express(model: Model, family: str = "") -> tuple[Family, Architecture, dict[str, Any]]:
    """Return the family and architecture of a model, and the fields of its config.json.

    Args:
      model: The model.
      family: `model_type` of the family; default: the first that can express the model.

    Raises:
      InteropError: No family can express the model; the message names the setting.
    """
    if family and family not in FAMILIES:
        raise InteropError(f"family {family}: is not known; give one of {', '.join(FAMILIES)}")
    problems: list[str] = []
    for candidate in [FAMILIES[family]] if family else FAMILIES.values():
        architectures = [x for x in candidate.architectures if MODELS[x.kind] is type(model)]
        if not architectures:
            continue
        try:
            return candidate, architectures[0], _write_config(candidate, architectures[0], model)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            problems.append(f"{candidate.model_type}: {' '.join(str(error).split())}")
    if not problems:
        raise InteropError(
            f"model {type(model).__name__}: has no counterpart in transformers that is supported; "
            "export a language model, masked language model, classifier or encoder-decoder"
        )
    # The family that agrees deepest into the config is the nearest one.
    nearest = max(problems, key=lambda problem: problem.count("."))
    raise InteropError(
        f"model: no architecture of transformers has it (nearest is {nearest}); change what differs"
    )


def _write_config(family: Family, architecture: Architecture, model: Model) -> dict[str, Any]:
    """Return the fields of a model's config.json.

    Raises:
      ValueError: Read again they give another model, or the files have no place for a parameter.
    """
    config = fill_in(model.config, model.config.d_model)
    written = family.write_config(config) | architecture.write_head(model)
    values = json.loads(json.dumps(written))
    read = family.read_config(Fields(values, family.model_type, family.model_type))
    if config.encoder is not None and not config.encoder.vocab_size and not read.tie_embeddings:
        # One table of source and target is written as two equal ones.
        encoder = dataclasses.replace(read.encoder or config.encoder, vocab_size=0)
        read = dataclasses.replace(read, encoder=encoder)
    if architecture.kind != "masked_lm":
        read = dataclasses.replace(read, masked_head=config.masked_head)  # without effect
    difference = find_difference(config, fill_in(read, read.d_model))
    if difference is None:
        theirs = fill_in(architecture.with_pooler(config), config.d_model)
        for name in ("pooler", "pooler_layer") if config.pooler else ("pooler",):
            if getattr(config, name) != getattr(theirs, name):
                difference = f"model.{name} {getattr(config, name)!r}"
    if difference is not None:
        raise ValueError(difference)
    model_tensors(family.rules(architecture), model_leaves(model), model.config)
    return written
