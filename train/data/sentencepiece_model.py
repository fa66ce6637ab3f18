"""SentencePiece models (Kudo and Richardson 2018) as tokenizers of the `tokenizers` library.

A model file is a protocol buffer: pieces with scores, and settings of the trainer and of the
normalizer. `parse_model` reads the fields that decide the tokens, so that neither `sentencepiece`
nor `protobuf` is needed; `make_backend` builds a tokenizer with the same ids and texts.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import struct
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tokenizers

SPACE = "▁"
"""Character that stands for a space in pieces."""

KEPT_SPACE = "\uffff"
"""Stands for a space while a text is decoded: no character, so that no text has it."""

MOST_SPACES = 1000
"""Bound of the spaces that are stripped from the start of a text."""


class Kind(enum.IntEnum):
    """Kind of a piece (`ModelProto.SentencePiece.Type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float = 0.0
    kind: Kind = Kind.NORMAL


@dataclasses.dataclass(frozen=True)
class SentencePieceModel:
    """Fields of a model file, with the defaults of the format."""

    pieces: tuple[Piece, ...] = ()
    model_type: int = 1
    """1: unigram; 2: BPE; 3: words; 4: characters."""
    byte_fallback: bool = False
    whitespace_as_suffix: bool = False
    unknown_surface: str = " \u2047 "
    """Text of the unknown token."""
    character_map: bytes = b""
    """Compiled rules of normalization (NFKC and others); empty: none."""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True

    def with_control(self, texts: Container[str]) -> SentencePieceModel:
        """Return the model with some of its pieces as control pieces, which no text becomes."""
        pieces = (
            piece._replace(kind=Kind.CONTROL)
            if piece.text in texts and piece.kind in (Kind.NORMAL, Kind.USER_DEFINED)
            else piece
            for piece in self.pieces
        )
        return dataclasses.replace(self, pieces=tuple(pieces))

    def of_kind(self, *kinds: Kind) -> list[str]:
        """Return the pieces of some kinds."""
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def parse_model(data: bytes) -> SentencePieceModel:
    """Read a model file.

    Raises:
      ValueError: It is damaged, or a model of a kind that is not supported.
    """
    pieces: list[Piece] = []
    settings: dict[str, object] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                pieces.append(_parse_piece(_as_bytes(value)))
            elif number == 2:
                settings |= _parse_trainer(_as_bytes(value))
            elif number == 3:
                settings |= _parse_normalizer(_as_bytes(value))
    except (IndexError, struct.error, TypeError, UnicodeDecodeError) as error:
        raise ValueError("is not a complete protocol buffer") from error
    model = SentencePieceModel(tuple(pieces), **settings)  # type: ignore[arg-type]
    _check(model)
    return model


def _check(model: SentencePieceModel) -> None:
    """Raise ValueError for a model that `make_backend` cannot express."""
    texts = [piece.text for piece in model.pieces]
    if len(set(texts)) != len(texts) or len(model.of_kind(Kind.UNKNOWN)) != 1:
        raise ValueError("has no vocabulary of distinct pieces with one unknown piece")
    if model.model_type not in (1, 2):
        name = {3: "words", 4: "characters"}.get(model.model_type, str(model.model_type))
        raise ValueError(f"is a model of {name}; unigram and BPE models are supported")
    if model.whitespace_as_suffix:
        raise ValueError("has treat_whitespace_as_suffix, which is not supported")
    if unused := model.of_kind(Kind.UNUSED):
        raise ValueError(f"has unused pieces ({unused[0]}), which are not supported")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message: an integer or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 5:
                size = 4
            case 2:
                size, at = _varint(data, at)
            case _:
                raise IndexError("a group, or no field")
        if size > len(data) - at:
            raise IndexError("a field beyond the end")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of 7 bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise IndexError("an integer of more than 64 bits")


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError("an integer in place of a message")
    return value


def _parse_piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, Kind.NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = _as_bytes(value).decode()
        elif number == 2:
            (score,) = struct.unpack("<f", _as_bytes(value))
        elif number == 3:
            kind = Kind(value)  # type: ignore[arg-type]
    return Piece(text, score, kind)


def _parse_trainer(data: bytes) -> dict[str, object]:
    found: dict[str, object] = {}
    for number, value in _fields(data):
        if number == 3:
            found["model_type"] = value
        elif number == 24:
            found["whitespace_as_suffix"] = bool(value)
        elif number == 35:
            found["byte_fallback"] = bool(value)
        elif number == 44:
            found["unknown_surface"] = _as_bytes(value).decode()
    return found


def _parse_normalizer(data: bytes) -> dict[str, object]:
    found: dict[str, object] = {}
    for number, value in _fields(data):
        if number == 2:
            found["character_map"] = _as_bytes(value)
        elif number == 3:
            found["add_dummy_prefix"] = bool(value)
        elif number == 4:
            found["remove_extra_whitespaces"] = bool(value)
        elif number == 5:
            found["escape_whitespaces"] = bool(value)
    return found


def make_backend(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model; control pieces are its special tokens."""
    from tokenizers import AddedToken, Tokenizer

    backend = Tokenizer(_unigram(model) if model.model_type == 1 else _bpe(model))
    backend.normalizer = _normalizer(model)
    if splitter := _splitter(model):
        backend.pre_tokenizer = splitter
    backend.decoder = _decoder(model)
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in model.of_kind(Kind.CONTROL)]
    )
    return backend


def _unigram(model: SentencePieceModel) -> tokenizers.models.Unigram:
    """Return the unigram language model of the pieces (Kudo 2018)."""
    from tokenizers import models

    normal = [piece.score for piece in model.pieces if piece.kind == Kind.NORMAL]
    lowest, highest = min(normal, default=0.0), max(normal, default=0.0)

    def score(piece: Piece) -> float:
        if piece.kind == Kind.NORMAL:
            return piece.score
        if piece.kind == Kind.USER_DEFINED:  # the bonus of SentencePiece's lattice
            return len(piece.text) * highest - 0.1
        return lowest  # not above: the score of an unknown character is relative to the lowest

    # 9 digits are a float32, and the JSON reader of `tokenizers` changes longer numbers.
    vocabulary = [(piece.text, float(f"{score(piece):.9g}")) for piece in model.pieces]
    unknown = next(n for n, piece in enumerate(model.pieces) if piece.kind == Kind.UNKNOWN)
    return models.Unigram(vocabulary, unknown, model.byte_fallback)


def _bpe(model: SentencePieceModel) -> tokenizers.models.BPE:
    """Return byte-pair encoding: neighbors are merged whose joint piece has the highest score."""
    from tokenizers import models

    scores = {piece.text: piece.score for piece in model.pieces if piece.kind == Kind.NORMAL}
    merges = [
        (-score, number, text[:cut], text[cut:])
        for number, (text, score) in enumerate(scores.items())
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return models.BPE(
        {piece.text: number for number, piece in enumerate(model.pieces)},
        [(left, right) for *_, left, right in sorted(merges)],
        unk_token=model.of_kind(Kind.UNKNOWN)[0],
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
        # User-defined pieces have no merges: `_splitter` isolates them, and they are looked up.
        ignore_merges=bool(model.of_kind(Kind.USER_DEFINED)),
    )


def _normalizer(model: SentencePieceModel) -> tokenizers.normalizers.Normalizer:
    from tokenizers import Regex, normalizers

    steps: list[tokenizers.normalizers.Normalizer] = []
    if model.character_map:
        steps.append(normalizers.Precompiled(model.character_map))
    if model.remove_extra_whitespaces:  # spaces alone, and no other white space
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    if model.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
        if model.remove_extra_whitespaces:  # at the end of a text also what it spells out
            steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _splitter(model: SentencePieceModel) -> tokenizers.pre_tokenizers.PreTokenizer | None:
    """Return what cuts a normalized text where no piece may lie across the cut."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[tokenizers.pre_tokenizers.PreTokenizer] = []
    # A text that spells out a special piece must not become it: cut after the first character.
    # SentencePiece has no such cut, so that a piece across it (`</`) is lost there.
    hidden = model.of_kind(Kind.CONTROL, Kind.UNKNOWN, Kind.BYTE)
    if hidden := [text for text in hidden if len(text) > 1]:
        spelled = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in hidden)
        steps.append(pre_tokenizers.Split(Regex(spelled), "merged_with_previous"))
    user_defined = sorted(model.of_kind(Kind.USER_DEFINED), key=len, reverse=True)
    if user_defined and model.model_type == 2:
        pattern = "|".join(map(re.escape, user_defined))
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    elif not any(re.search(f"[^{SPACE}]{SPACE}", piece.text) for piece in model.pieces):
        # Words apart are as fast as they can be cached; nothing else changes.
        pattern = f"[^{SPACE}](?={SPACE})"
        steps.append(pre_tokenizers.Split(Regex(pattern), "merged_with_previous"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _decoder(model: SentencePieceModel) -> tokenizers.decoders.Decoder:
    from tokenizers import decoders

    (unknown,) = model.of_kind(Kind.UNKNOWN)
    steps: list[tokenizers.decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    else:  # its first space is not one that `Strip` takes away
        surface = model.unknown_surface.replace(" ", KEPT_SPACE)
        steps.append(decoders.Replace(unknown, surface))
    steps.append(decoders.Fuse())
    if model.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", MOST_SPACES, 0))
    elif model.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    if not model.byte_fallback:
        steps.append(decoders.Replace(KEPT_SPACE, " "))
    return decoders.Sequence(steps)
