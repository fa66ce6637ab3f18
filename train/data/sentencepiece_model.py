"""SentencePiece models (Kudo and Richardson 2018) as tokenizers of the `tokenizers` library.

A model file is a protocol buffer: pieces with scores, and settings of the trainer and of the
normalizer. `read_model` reads the fields that decide the tokens; `make_backend` builds a tokenizer
with the same ids and texts.

The `sentencepiece` package would read it too, but its processor does not tell the settings, and its
protocol buffer asks for a newer protobuf than Colab has. Here protobuf gets the fields themselves.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

SPACE = "▁"
"""Character that stands for a space in pieces."""

KEPT_SPACE = "\uffff"
"""Stands for a space while a text is decoded: no character, so that no text has it."""

MOST_SPACES = 1000
"""Bound of the spaces that are stripped from the start of a text."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces."""

UNIGRAM, BPE = 1, 2
"""Types of models."""

_Field = descriptor_pb2.FieldDescriptorProto

# Of sentencepiece_model.proto: the fields by name, each with its number, its type and its default.
_MESSAGES: dict[str, dict[str, tuple[int, Any, str]]] = {
    "Piece": {
        "piece": (1, _Field.TYPE_STRING, ""),
        "score": (2, _Field.TYPE_FLOAT, "0"),
        "type": (3, _Field.TYPE_INT32, "1"),
    },
    "Trainer": {
        "model_type": (3, _Field.TYPE_INT32, "1"),
        "treat_whitespace_as_suffix": (24, _Field.TYPE_BOOL, "false"),
        "byte_fallback": (35, _Field.TYPE_BOOL, "false"),
        "unk_surface": (44, _Field.TYPE_STRING, " \u2047 "),
    },
    "Normalizer": {
        "precompiled_charsmap": (2, _Field.TYPE_BYTES, ""),
        "add_dummy_prefix": (3, _Field.TYPE_BOOL, "true"),
        "remove_extra_whitespaces": (4, _Field.TYPE_BOOL, "true"),
        "escape_whitespaces": (5, _Field.TYPE_BOOL, "true"),
    },
}


def _model_class() -> Any:
    """Return the class of the message that a model file holds."""
    file = descriptor_pb2.FileDescriptorProto(
        name="train/sentencepiece_model.proto", package="train", syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        declared = file.message_type.add(name=name)
        for field, (number, kind, default) in fields.items():
            declared.field.add(name=field, number=number, type=kind, label=1, default_value=default)
    model = file.message_type.add(name="Model")
    for number, (field, name, label) in enumerate(
        (
            ("pieces", "Piece", _Field.LABEL_REPEATED),
            ("trainer", "Trainer", _Field.LABEL_OPTIONAL),
            ("normalizer", "Normalizer", _Field.LABEL_OPTIONAL),
        ),
        start=1,
    ):
        model.field.add(
            name=field,
            number=number,
            type=_Field.TYPE_MESSAGE,
            label=label,
            type_name=f".train.{name}",
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("train.Model"))


_Model = _model_class()


def read_model(data: bytes, control: Container[str] = ()) -> Any:
    """Return the message of a model file.

    Args:
      data: Content of the file.
      control: Texts of pieces that become control pieces, which no text is tokenized as.

    Raises:
      ValueError: It is damaged, or a model of a kind that is not supported.
    """
    try:
        model = _Model.FromString(data)
        texts = [piece.piece for piece in model.pieces]
    except (message.DecodeError, UnicodeDecodeError) as error:
        raise ValueError("is not a complete protocol buffer") from error
    if len(set(texts)) != len(texts) or len(_of_type(model, UNKNOWN)) != 1:
        raise ValueError("has no vocabulary of distinct pieces with one unknown piece")
    if (kind := model.trainer.model_type) not in (UNIGRAM, BPE):
        name = {3: "words", 4: "characters"}.get(kind, str(kind))
        raise ValueError(f"is a model of {name}; unigram and BPE models are supported")
    if model.trainer.treat_whitespace_as_suffix:
        raise ValueError("has treat_whitespace_as_suffix, which is not supported")
    if unused := _of_type(model, UNUSED):
        raise ValueError(f"has unused pieces ({unused[0]}), which are not supported")
    for piece in model.pieces:
        if piece.piece in control and piece.type in (NORMAL, USER_DEFINED):
            piece.type = CONTROL
    return model


def _of_type(model: Any, *types: int) -> list[str]:
    """Return the pieces of some types."""
    return [piece.piece for piece in model.pieces if piece.type in types]


def make_backend(model: Any) -> Tokenizer:
    """Return the tokenizer of a model; control pieces are its special tokens."""
    backend = Tokenizer(_unigram(model) if model.trainer.model_type == UNIGRAM else _bpe(model))
    backend.normalizer = _normalizer(model)
    if splitter := _splitter(model):
        backend.pre_tokenizer = splitter
    backend.decoder = _decoder(model)
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in _of_type(model, CONTROL)]
    )
    return backend


def _unigram(model: Any) -> models.Unigram:
    """Return the unigram language model of the pieces (Kudo 2018)."""
    normal = [piece.score for piece in model.pieces if piece.type == NORMAL]
    lowest, highest = min(normal, default=0.0), max(normal, default=0.0)

    def score(piece: Any) -> float:
        if piece.type == NORMAL:
            return piece.score
        if piece.type == USER_DEFINED:  # the bonus of SentencePiece's lattice
            return len(piece.piece) * highest - 0.1
        return lowest  # not above: the score of an unknown character is relative to the lowest

    # 9 digits are a float32, and the JSON reader of `tokenizers` changes longer numbers.
    vocabulary = [(piece.piece, float(f"{score(piece):.9g}")) for piece in model.pieces]
    unknown = next(n for n, piece in enumerate(model.pieces) if piece.type == UNKNOWN)
    return models.Unigram(vocabulary, unknown, model.trainer.byte_fallback)


def _bpe(model: Any) -> models.BPE:
    """Return byte-pair encoding: neighbors are merged whose joint piece has the highest score."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == NORMAL}
    merges = [
        (-score, number, text[:cut], text[cut:])
        for number, (text, score) in enumerate(scores.items())
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    return models.BPE(
        {piece.piece: number for number, piece in enumerate(model.pieces)},
        [(left, right) for *_, left, right in sorted(merges)],
        unk_token=_of_type(model, UNKNOWN)[0],
        fuse_unk=True,
        byte_fallback=model.trainer.byte_fallback,
        # User-defined pieces have no merges: `_splitter` isolates them, and they are looked up.
        ignore_merges=bool(_of_type(model, USER_DEFINED)),
    )


def _normalizer(model: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if model.normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(model.normalizer.precompiled_charsmap))
    if model.normalizer.remove_extra_whitespaces:  # spaces alone, and no other white space
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if model.normalizer.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    if model.normalizer.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
        if (
            model.normalizer.remove_extra_whitespaces
        ):  # at the end of a text also what it spells out
            steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _splitter(model: Any) -> pre_tokenizers.PreTokenizer | None:
    """Return what cuts a normalized text where no piece may lie across the cut."""
    steps: list[pre_tokenizers.PreTokenizer] = []
    # A text that spells out a special piece must not become it: cut after the first character.
    # SentencePiece has no such cut, so that a piece across it (`</`) is lost there.
    hidden = _of_type(model, CONTROL, UNKNOWN, BYTE)
    if hidden := [text for text in hidden if len(text) > 1]:
        spelled = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in hidden)
        steps.append(pre_tokenizers.Split(Regex(spelled), "merged_with_previous"))
    user_defined = sorted(_of_type(model, USER_DEFINED), key=len, reverse=True)
    if user_defined and model.trainer.model_type == BPE:
        pattern = "|".join(map(re.escape, user_defined))
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    elif not any(re.search(f"[^{SPACE}]{SPACE}", piece.piece) for piece in model.pieces):
        # Words apart are as fast as they can be cached; nothing else changes.
        pattern = f"[^{SPACE}](?={SPACE})"
        steps.append(pre_tokenizers.Split(Regex(pattern), "merged_with_previous"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _decoder(model: Any) -> decoders.Decoder:
    (unknown,) = _of_type(model, UNKNOWN)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.trainer.byte_fallback:
        steps.append(decoders.ByteFallback())
    else:  # its first space is not one that `Strip` takes away
        surface = model.trainer.unk_surface.replace(" ", KEPT_SPACE)
        steps.append(decoders.Replace(unknown, surface))
    steps.append(decoders.Fuse())
    if model.normalizer.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", MOST_SPACES, 0))
    elif model.normalizer.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    if not model.trainer.byte_fallback:
        steps.append(decoders.Replace(KEPT_SPACE, " "))
    return decoders.Sequence(steps)
