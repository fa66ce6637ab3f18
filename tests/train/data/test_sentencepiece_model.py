"""SentencePiece models: ids and texts of the package, by fixtures that a drill writes."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from train.data.tokenizer import Tokenizer
from train.errors import UserError

FIXTURES = Path(__file__).parent / "sentencepiece"


def field(number: int, value: int | float | bytes) -> bytes:
    """Return a field of a protocol buffer: an integer, a float or bytes."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def varint(value: int) -> bytes:
    groups = []
    while True:
        value, group = divmod(value, 128)
        groups.append(group | (128 if value else 0))
        if not value:
            return bytes(groups)


def model_file(
    pieces: list[tuple[str, float, int]], trainer: bytes = b"", normalizer: bytes = b""
) -> bytes:
    listed = [
        field(1, field(1, text.encode()) + field(2, score) + field(3, kind))
        for text, score, kind in pieces
    ]
    return b"".join([*listed, field(2, trainer), field(3, normalizer)])


PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁", -1.0, 1), ("a", -2.0, 1)]


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_ids_and_texts_match_sentencepiece(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(FIXTURES / f"{name}.model")
    lines = (FIXTURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert len(records) == 50
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path).digest == tokenizer.digest
    assert len({token for each in records for token in each["ids"]}) > 200
    for record in records:
        assert tokenizer.encode(record["text"]).tolist() == record["ids"], record["text"]
        assert tokenizer.decode(record["ids"]) == record["decoded"], record["text"]


def test_unigram_chooses_the_likeliest_pieces(tmp_path: Path) -> None:
    """▁a + b is likelier than ▁ + ab; c is unknown, and two of them are one token."""
    pieces = [*PIECES, ("b", -2.5, 1), ("ab", -3.0, 1), ("▁a", -1.25, 1), ("<x>", 0.0, 4)]
    (tmp_path / "spiece.model").write_bytes(model_file(pieces))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("ab").tolist() == [7, 5]
    assert tokenizer.encode("  ab   ccb ").tolist() == [7, 5, 3, 0, 5]
    assert tokenizer.decode([7, 5, 3, 0, 5]) == "ab  \u2047 b"
    assert tokenizer.decode([3, 0, 5, 0]) == " \u2047 b \u2047 "  # one space is the prefix
    assert tokenizer.encode("a<x>b").tolist() == [7, 8, 5]
    assert (tokenizer.eos_token_id, tokenizer.vocab_size) == (2, 9)
    assert tokenizer.special_token_ids == {1, 2}


def test_bpe_merges_highest_score_first(tmp_path: Path) -> None:
    """b + c is merged before a + b, and then a has no partner."""
    pieces = [*PIECES, ("b", -5.0, 1), ("c", -6.0, 1), ("ab", -2.0, 1), ("bc", -1.0, 1)]
    settings = field(3, 2) + field(35, 1)
    plain = field(3, 0) + field(4, 0)  # no dummy prefix, and spaces are kept
    data = model_file([*pieces, *((f"<0x{n:02X}>", 0.0, 6) for n in range(256))], settings, plain)
    (tmp_path / "tokenizer.model").write_bytes(data)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("abc").tolist() == [4, 8]
    assert tokenizer.encode("ab  a").tolist() == [7, 3, 3, 4]
    assert tokenizer.encode("é").tolist() == [9 + 0xC3, 9 + 0xA9]
    assert tokenizer.decode([3, 7, 9 + 0xC3, 9 + 0xA9, 2]) == " abé"


@pytest.mark.parametrize("text", ["<s>", "a</s>a", "<unk>", "<0x41>"])
def test_text_never_encodes_to_special_pieces(tmp_path: Path, text: str) -> None:
    for trainer in (b"", field(3, 2)):
        pieces = [*PIECES, *((c, -7.0, 1) for c in "</>s"), ("<0x41>", 0.0, 6)]
        (tmp_path / "tokenizer.model").write_bytes(model_file(pieces, trainer))
        tokens = Tokenizer.load(tmp_path).encode(text).tolist()
        assert not {1, 2, 9} & set(tokens)
        assert len(tokens) > 2


def test_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file([*PIECES, ("<turn>", 0.0, 4)]))
    (tmp_path / "added_tokens.json").write_text('{"<b>": 7, "<pad>": 6}')
    config: dict[str, Any] = {
        "pad_token": "<pad>",
        "added_tokens_decoder": {"5": {"content": "<turn>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a<b>a<turn>").tolist()[:3] == [3, 4, 7]
    assert 5 not in tokenizer.encode("<turn>")  # no text forges a turn
    assert tokenizer.encode_with_special_tokens("<turn>")[0].tolist()[-1] == 5
    assert tokenizer.special_token_ids == {1, 2, 5, 6}
    assert tokenizer.vocab_size == 8
    config = {"extra_ids": 3}  # of T5
    (tmp_path / "added_tokens.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = Tokenizer.load(tmp_path).vocabulary
    assert [vocabulary[f"<extra_id_{n}>"] for n in range(3)] == [8, 7, 6]
    config = {"added_tokens_decoder": {"4": {"content": "<pad>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"give token <pad> the id 4, and tokenizer.model does not"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": {}}}')
    with pytest.raises(UserError, match="its added tokens are malformed"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no vocabulary of distinct pieces"),
        (b"\xff" * 40, "is not a complete protocol buffer"),
        (b"PK\x03\x04 some archive", "is not a complete protocol buffer"),
        (model_file(PIECES)[:-3], "is not a complete protocol buffer"),
        (model_file(PIECES)[:-5], "is not a complete protocol buffer"),  # within a piece
        (field(1, 3), "has no vocabulary of distinct pieces"),
        (field(1, field(1, b"\xff")), "has no vocabulary of distinct pieces"),
        (model_file([*PIECES, ("a", 0.0, 1)]), "has no vocabulary of distinct pieces"),
        (model_file(PIECES, field(3, 3)), "is a model of words; unigram and BPE"),
        (model_file(PIECES, field(24, 1)), "has treat_whitespace_as_suffix"),
        (model_file([*PIECES, ("b", 0.0, 5)]), r"has unused pieces \(b\)"),
        (model_file(PIECES, b"", field(2, b"\x07\x00")), "damaged, or no tokenizer"),
    ],
    ids=range(12),
)
def test_damaged_and_unsupported_models_raise(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(UserError, match=rf"tokenizer\.model: {message}.*; (fetch|give)") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_model_with_other_ids_than_the_tokenizer_raises(tmp_path: Path) -> None:
    data = model_file(PIECES)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(data)
    with pytest.raises(UserError, match="has other ids than the tokenizer; where transformers"):
        Tokenizer.load(tmp_path)
