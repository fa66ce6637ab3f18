"""All families, by `model_type`, and the architectures that are refused by name."""

from transformer.interop.bert import BERT, DISTILBERT, ROBERTA
from transformer.interop.config_fields import CONFIG_FIELDS
from transformer.interop.family import Architecture, Family
from transformer.interop.fields import InteropError
from transformer.interop.gemma import GEMMA, GEMMA2, GEMMA3
from transformer.interop.gpt import BLOOM, GPT2, GPT_NEOX, OPT
from transformer.interop.gpt_oss import GPT_OSS
from transformer.interop.llama import LLAMA, MISTRAL, MIXTRAL, PHI3, QWEN2, QWEN3
from transformer.interop.longformer_bigbird import BIG_BIRD, LONGFORMER
from transformer.interop.modernbert import MODERNBERT
from transformer.interop.seq2seq import BART, MARIAN, T5

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
        BERT,
        ROBERTA,
        DISTILBERT,
        MODERNBERT,
        LONGFORMER,
        BIG_BIRD,
        T5,
        BART,
        MARIAN,
    )
}
"""Families in the order in which `export` tries them for a model without a family of its own."""


REFUSED = {
    "albert": "all layers share one set of weights",
    "cohere": "its RoPE pairs neighboring entries under norms without biases",
    "cohere2": "its RoPE pairs neighboring entries, and global layers have no positions",
    "deepseek_v2": "it has multi-head latent attention and shared experts",
    "deepseek_v3": "it has multi-head latent attention and shared experts",
    "falcon": "its layers have one norm for attention and feed-forward",
    "gptj": "its output matrix has a bias and its layers one norm",
    "mamba": "it is a state-space model",
    "olmo2": "it normalizes whole queries and keys across their heads, and the sublayers' outputs",
    "phi": "its output matrix has a bias and its layers one norm",
    "qwen2_moe": "it has shared experts with a gate of their own",
    "qwen3_moe": "its layers mix experts and plain feed-forwards by index",
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
            f"{', '.join(FAMILIES)}"
        )
    names = [names] if isinstance(names, str) else names
    asked = names if isinstance(names, list) and names else [family.architectures[0].name]
    for architecture in family.architectures:
        if architecture.name in asked:
            return family, architecture, ""
    for name in asked:
        if name in CONFIG_FIELDS[model_type].classes:
            return family, family.architectures[0], name
    known = ", ".join(each.name for each in family.architectures)
    raise InteropError(
        f"{source}: architectures {asked} are not supported; known for {model_type} are {known}"
    )
