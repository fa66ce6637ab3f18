"""Attention maps as compact data of a page: one byte a pair of tokens, compressed by head.

A code is 0 for a hidden pair and 1 + round(254 √w) for a weight w: the root keeps small weights
apart, and a weight read back is at most 0.004 off. A page draws thumbnails first and decompresses
a head when it is opened.
"""

import base64
import unicodedata
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from train.data.tokenizer import Tokenizer
from transformer.attention_maps import AttentionMap

THUMBNAIL_SIZE = 64
"""Largest number of rows and columns of a thumbnail."""

MAX_CODE = 255

STAGE_TITLES = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "Cross-attention",
}
"""Names of the stages, for people."""


def encode_weights(
    weights: np.ndarray,  # [N, T, S]
    visible: np.ndarray,  # [N or 1, T, S] booleans
) -> np.ndarray:  # [N, T, S] uint8
    """Return the codes of weights."""
    roots = np.sqrt(np.clip(weights, 0, 1))
    codes = 1 + np.rint((MAX_CODE - 1) * roots).astype(np.uint8)
    return np.where(visible, codes, np.uint8(0))


def decode_weights(codes: np.ndarray) -> np.ndarray:
    """Return the weights of codes, as the page computes them; 0 where hidden."""
    roots = (np.maximum(codes, 1).astype(np.float64) - 1) / (MAX_CODE - 1)
    return np.asarray(roots**2)


def shrink(codes: np.ndarray, size: int = THUMBNAIL_SIZE) -> np.ndarray:  # [N, T, S]
    """Return thumbnails: the largest code of each cell, so that no bright pair is lost."""
    for axis in (1, 2):
        length = codes.shape[axis]
        if length > size:
            starts = np.arange(size) * length // size
            codes = np.maximum.reduceat(codes, starts, axis=axis)
    return codes


def compress(codes: np.ndarray) -> str:
    """Return bytes as base64 of a raw deflate stream, which browsers decompress themselves."""
    deflate = zlib.compressobj(6, wbits=-zlib.MAX_WBITS)
    stream = deflate.compress(np.ascontiguousarray(codes).tobytes()) + deflate.flush()
    return base64.b64encode(stream).decode()


def pack_maps(maps: Sequence[AttentionMap], example: int = 0) -> list[dict[str, Any]]:
    """Return the stages of one example as JSON: their layers, thumbnails and heads."""
    stages: list[dict[str, Any]] = []
    for name, title in STAGE_TITLES.items():
        layers = [pack_layer(each, example) for each in maps if each.stage == name]
        if layers:
            stages.append({"name": name, "title": title, "layers": layers})
    return stages


def pack_layer(attention: AttentionMap, example: int = 0) -> dict[str, Any]:
    """Return a layer of one example as JSON."""
    weights, visible = np.asarray(attention.weights)[example], np.asarray(attention.visible)
    codes = encode_weights(weights, visible[example if len(visible) > 1 else 0])
    thumbnails = shrink(codes)
    return {
        "layer": attention.layer,
        "mixer": attention.mixer,
        "shape": list(codes.shape),
        "thumbnail_shape": list(thumbnails.shape),
        "thumbnails": compress(thumbnails),
        "heads": [compress(head) for head in codes],
    }


def token_labels(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return each token as visible text: spaces, line ends and invisible characters have signs.

    Tokens without text, such as separators, have their name in the vocabulary.
    """
    names = {token: name for name, token in tokenizer.vocabulary.items()}
    return [_label(tokenizer.decode([token]), names.get(token, f"#{token}")) for token in tokens]


def _label(text: str, name: str) -> str:
    if not text or "\N{REPLACEMENT CHARACTER}" in text:  # a separator, or a part of a character
        text = name
    # Marks of a word's beginning in byte-level and SentencePiece vocabularies.
    if name[:1] in ("Ġ", "▁") and not text.startswith((" ", "Ġ", "▁")):
        text = " " + text
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    """Return a character, or a sign of one that would be invisible or change its neighbors."""
    signs = {" ": "·", "\n": "↵", "\t": "→", "Ġ": "·", "▁": "·", "Ċ": "↵"}
    if character in signs:
        return signs[character]
    # Controls, formats (zero-width and bidirectional marks), separators and surrogates.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Zs"):
        return f"‹U+{ord(character):04X}›"
    return character
