"""Chunks of long texts, cut only where the tokens do not change.

Chunks are tokenized in parallel and in little memory: a text of 10 MB takes over 2 GB whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

CHUNK_CHARACTERS = 1 << 16

# The word tokenizer replaces a newline by this, so that it is a word like the others.
NEWLINE_REPLACEMENT = " <eos> "

# A space or a newline after any other character. GPT-2's pattern, BERT's and a split on white
# space all end a word there, whatever follows, and begin the next one without looking back.
_BOUNDARY = re.compile(r"(?<=\S)[ \n]")


def split_into_chunks(text: str, size: int = CHUNK_CHARACTERS) -> Iterator[str]:
    """Yield chunks of ``size`` characters or slightly more, which join to the text."""
    start = 0
    while boundary := _BOUNDARY.search(text, start + size):
        yield text[start : boundary.start()]
        start = boundary.start()
    yield text[start:]


def can_be_chunked(backend: tokenizers.Tokenizer) -> bool:
    """Return True if the tokens of the chunks of any text are the tokens of the text."""
    if not _keeps_boundaries(component_spec(backend.normalizer)):
        return False
    splitter = component_spec(backend.pre_tokenizer)
    if not splitter:
        return is_character_model(component_spec(backend.model))
    if splitter["type"] == "ByteLevel":
        return bool(splitter["use_regex"]) and not splitter["add_prefix_space"]
    return splitter["type"] in ("BertPreTokenizer", "WhitespaceSplit")


def is_character_model(model: dict[str, Any]) -> bool:
    """Return True if a model gives each character its own token and drops unknown ones.

    Args:
      model: The model as `component_spec` returns it.
    """
    return (
        model["type"] == "BPE"
        and not model["merges"]
        and not model["unk_token"]
        and not model["byte_fallback"]
    )


def component_spec(component: Any) -> dict[str, Any]:
    """Return a tokenizer's component as in its tokenizer.json; empty if it has none."""
    return json.loads(component.__getstate__()) if component is not None else {}


def _keeps_boundaries(normalizer: dict[str, Any]) -> bool:
    match normalizer:
        case {} if not normalizer:
            return True
        case {"type": "Sequence", "normalizers": steps}:
            return all(_keeps_boundaries(step) for step in steps)
        case {"type": "Replace", **rest}:
            return rest == {"pattern": {"String": "\n"}, "content": NEWLINE_REPLACEMENT}
        case _:
            return normalizer["type"] in ("Lowercase", "BertNormalizer")
