"""Text parts of multimodal files: where a config.json and its tensors have the language model.

The text part is read as a model of its text family. What else the files have (a vision tower, a
projector) is left out and named.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from transformer.interop.fields import COMMON, CONFIG_FIELDS, InteropError


class TextPart(NamedTuple):
    """The text part of one multimodal type."""

    model_type: str
    """Type of `text_config`: that of every file, or of those whose `text_config` names none."""
    is_any: bool = False
    """`text_config` may name another type."""
    tied: bool = False
    """Default of `tie_word_embeddings` of the whole model."""


MULTIMODAL = {
    "gemma3": TextPart("gemma3_text", tied=True),
    "llava": TextPart("llama", is_any=True),
    "mistral3": TextPart("mistral", is_any=True, tied=True),
    "qwen2_vl": TextPart("qwen2_vl_text"),
    "qwen2_5_vl": TextPart("qwen2_5_vl_text"),
    "qwen3_vl": TextPart("qwen3_vl_text"),
}
"""Text parts by the `model_type` of the whole."""

TEXT_FAMILIES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Families of text types that are no types of plain language models: they have other defaults."""

ROPE_FIELDS = ("rope_scaling", "rope_parameters")

SECTIONS = ("mrope_section", "mrope_interleaved")
"""Parameters of mRoPE: which frequencies turn with the time, the height and the width."""

TEXT_NAMES = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
"""Starts of the text part's tensors where a file has them as a plain language model (Qwen2-VL)."""


def read_text_config(values: Mapping[str, Any], source: str) -> tuple[dict[str, Any], str]:
    """Return the config of the text part with the `model_type` of its family, and its own type.

    Args:
      values: A config.json whose `model_type` is in `MULTIMODAL`.
      source: Path of the file.

    Raises:
      InteropError: It has no text config.
    """
    part = MULTIMODAL[values["model_type"]]
    text = values.get("text_config")
    text_type = part.model_type
    if isinstance(text, dict):
        text = {name: value for name, value in text.items() if not name.startswith("_")}
        text_type = str(text.get("model_type", text_type)) if part.is_any else text_type
    elif text is None and text_type in TEXT_FAMILIES:
        # The first files of Qwen2-VL have the fields of the text part beside the others.
        known = CONFIG_FIELDS[text_type]
        names = known.defaults.keys() | known.aliases.keys() | COMMON
        text = {name: value for name, value in values.items() if name in names}
    else:
        raise InteropError(f"{source}: has no text_config; fetch the original file")
    for name in ROPE_FIELDS:
        if isinstance(text.get(name), dict):
            text[name] = plain_rope(text[name])
    tied = values.get("tie_word_embeddings", part.tied) or text.get("tie_word_embeddings", False)
    family = TEXT_FAMILIES.get(text_type, text_type)
    return text | {"model_type": family, "tie_word_embeddings": tied}, text_type


def plain_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of RoPE that mRoPE is for text.

    A token of text has the same position in time, height and width (Wang et al. 2024, section 2.1),
    so that it does not matter which frequencies turn with which of the three.
    """
    plain = {name: value for name, value in parameters.items() if name not in SECTIONS}
    return {name: "default" if value == "mrope" else value for name, value in plain.items()}


def other_class(names: object) -> str:
    """Return the class of multimodal files that is no language model; empty if it is one."""
    known = [names] if isinstance(names, str) else names if isinstance(names, list) else []
    if not known or any(str(name).endswith("ForConditionalGeneration") for name in known):
        return ""
    return str(known[0])


def text_tensor_name(name: str) -> str:
    """Return the name of a tensor in the text family; empty for tensors of other parts."""
    # model.language_model.layers (transformers 5), language_model.model.layers (4), or without
    # `model` in files of the body alone.
    if match := re.fullmatch(r"(?:model\.)?language_model\.(?:model\.)?(.+)", name):
        rest = match[1]
        return rest if rest.startswith("lm_head.") else f"model.{rest}"
    return name if name.startswith(TEXT_NAMES) else ""


def left_out_note(model_type: str, family: str, names: Iterable[str]) -> str:
    """Return the note about what is not read of multimodal files.

    Args:
      model_type: Type of the whole.
      family: Type that the text part is read as.
      names: Names of the tensors of other parts.
    """
    parts = sorted({name.removeprefix("model.").partition(".")[0] for name in names})
    return f"the text part of {model_type} is read as {family}" + (
        f"; without {', '.join(parts)}" if parts else ""
    )
