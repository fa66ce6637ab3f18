import pathlib

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from train.data.data_config import TokenizerConfig
from train.data.text_files import Document
from train.data.token_file import read_stream, stream_is_complete, write_stream
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer


@pytest.fixture(scope="module")
def byte() -> Tokenizer:
    return train_tokenizer(TokenizerConfig("byte"), [])


def test_separator_precedes_each_document_and_ends_the_stream(
    byte: Tokenizer, tmp_path: pathlib.Path
) -> None:
    documents = [Document("a", "ab"), Document("b", "é"), Document("c", "c")]
    facts = write_stream(tmp_path, "train", documents, byte)
    assert (facts["documents"], facts["tokens"], facts["bytes"]) == (3, 9, 5)
    stream = read_stream(tmp_path, "train", facts)
    assert stream.tokens.tolist() == [256, 97, 98, 256, 0xC3, 0xA9, 256, 99, 256]
    assert stream.document_starts.tolist() == [0, 3, 6]
    assert isinstance(stream.tokens, np.memmap)
    assert (stream.name, stream.num_bytes, stream.num_targets) == ("train", 5, 8)


def test_final_separator_is_not_repeated(tmp_path: pathlib.Path) -> None:
    tokenizer = train_tokenizer(TokenizerConfig("word"), ["a b\n"])  # 0 is <unk>, 1 <eos>
    documents = [
        Document("1", "a\nb\n"),
        Document("2", " \t "),
        Document("3", "b"),
        Document("4", "\n"),
    ]
    facts = write_stream(tmp_path, "test", documents, tokenizer)
    stream = read_stream(tmp_path, "test", facts)
    assert stream.tokens.tolist() == [1, 2, 1, 3, 1, 3, 1, 1]
    assert stream.document_starts.tolist() == [0, 4, 6]


def test_large_vocabularies_use_four_bytes(tmp_path: pathlib.Path) -> None:
    for largest, dtype in ((65_535, np.uint16), (65_536, np.uint32)):
        backend = Backend(models.WordLevel({"<eos>": 0, "a": 1, "z": largest}, unk_token="a"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        facts = write_stream(tmp_path, "train", [Document("a", "a z")], Tokenizer(backend))
        tokens = read_stream(tmp_path, "train", facts).tokens
        assert tokens.dtype == dtype
        assert tokens.tolist() == [0, 1, largest, 0]


def test_digest_depends_on_text_and_document_boundaries(
    byte: Tokenizer, tmp_path: pathlib.Path
) -> None:
    def digest(*documents: tuple[str, str]) -> str:
        named = [Document(name, text) for name, text in documents]
        return write_stream(tmp_path, "train", named, byte)["digest"]

    assert digest(("a", "xy")) == digest(("a", "xy"))
    assert digest(("b.gz", "xy")) == digest(("a", "xy"))
    assert len({digest(("a", "xy")), digest(("a", "xz")), digest(("a", "x"), ("a", "y"))}) == 3


def test_truncated_files_are_detected(byte: Tokenizer, tmp_path: pathlib.Path) -> None:
    facts = write_stream(tmp_path, "train", [Document("a", "text")], byte)
    assert stream_is_complete(tmp_path, "train", facts)
    for name in ("train.tokens", "train.starts"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-1])
        assert not stream_is_complete(tmp_path, "train", facts)
        (tmp_path / name).unlink()
        assert not stream_is_complete(tmp_path, "train", facts)
        (tmp_path / name).write_bytes(content)
    assert stream_is_complete(tmp_path, "train", facts)
