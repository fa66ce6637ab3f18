import gzip
import os
import pathlib
from typing import Any

import pytest

from train.data import corpus
from train.data.config import TextDataConfig, TokenizerConfig, TokenizerKind
from train.data.corpus import prepare_text
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Eleven documents; document n has n + 1 lines."""
    (tmp_path / "texts").mkdir()
    for n in range(11):
        (tmp_path / "texts" / f"{n:02}.txt").write_text(f"line of document {n}\n" * (n + 1))
    return tmp_path / "texts"


@pytest.fixture
def cache(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "cache"


def config(path: object, kind: TokenizerKind = "byte", **settings: Any) -> TextDataConfig:
    return TextDataConfig(str(path), tokenizer=TokenizerConfig(kind), **settings)


def test_whole_documents_are_held_out_and_encoded(
    folder: pathlib.Path, cache: pathlib.Path
) -> None:
    found = prepare_text(config(folder, validation_fraction=0.3), cache_dir=cache)
    train, validation = found.split("train"), found.split("validation")
    texts = {file.read_text() for file in folder.iterdir()}
    assert train.num_bytes + validation.num_bytes == sum(map(len, texts))
    assert 0 < validation.num_bytes <= 0.3 * (train.num_bytes + validation.num_bytes)
    for stream in (train, validation):
        decoded = [
            found.tokenizer.decode(stream.tokens[start:end])
            for start, end in zip(
                stream.document_starts,
                [*stream.document_starts[1:], len(stream.tokens) - 1],
                strict=True,
            )
        ]
        assert len(decoded) == len(set(decoded))
        assert set(decoded) <= texts
        texts -= set(decoded)
    assert not texts


def test_the_second_time_nothing_is_read_or_learned(
    folder: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_text(config(folder, "bpe"), cache_dir=cache)
    with monkeypatch.context() as patch:
        for name in ("write_stream", "train_tokenizer"):
            patch.delattr(corpus, name)
        again = prepare_text(config(folder, "bpe"), cache_dir=cache)
        own = prepare_text(config(folder, "word"), tokenizer=first.tokenizer, cache_dir=cache)
    assert first.digest == again.digest == own.digest
    assert again.split("train").tokens.tolist() == first.split("train").tokens.tolist()
    os.utime(folder / "00.txt", ns=(1, 1))
    with monkeypatch.context() as patch:
        patch.delattr(corpus, "train_tokenizer")
        with pytest.raises(NameError):
            prepare_text(config(folder, "bpe"), cache_dir=cache)
    assert prepare_text(config(folder, "bpe"), cache_dir=cache).digest == first.digest
    (folder / "00.txt").write_text("other")
    assert prepare_text(config(folder, "bpe"), cache_dir=cache).digest != first.digest


def test_a_damaged_cache_is_written_again(folder: pathlib.Path, cache: pathlib.Path) -> None:
    first = prepare_text(config(folder), cache_dir=cache)
    (entry,) = (path for path in cache.glob("tokens-*") if path.is_dir())
    whole = (entry / "train.tokens").read_bytes()
    for name, content in (("train.tokens", whole[:-2]), ("corpus.json", b'{"train": {')):
        (entry / name).write_bytes(content)
        assert prepare_text(config(folder), cache_dir=cache).digest == first.digest
        assert (entry / "train.tokens").read_bytes() == whole


def test_the_tokenizer_is_learned_from_the_training_split(
    tmp_path: pathlib.Path, cache: pathlib.Path
) -> None:
    (tmp_path / "train").write_text("aa bb")
    (tmp_path / "validation").write_text("aa cc")
    settings = {"validation_path": str(tmp_path / "validation")}
    found = prepare_text(config(tmp_path / "train", "word", **settings), cache_dir=cache)
    assert found.split("train").tokens.tolist() == [1, 2, 3, 1]
    assert found.split("validation").tokens.tolist() == [1, 2, 0, 1]


def test_the_alphabet_is_that_of_all_splits(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    (tmp_path / "train").write_text("abc")
    (tmp_path / "validation").write_text("é")
    settings = {"validation_path": str(tmp_path / "validation")}
    found = prepare_text(config(tmp_path / "train", "character", **settings), cache_dir=cache)
    assert found.tokenizer.vocab_size == 5
    assert found.split("validation").tokens.tolist() == [4, 3, 4]


def test_a_tail_is_one_run_of_characters(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 3)
    settings: dict[str, Any] = {"split_method": "tail", "validation_fraction": 0.2}
    found = prepare_text(config(tmp_path / "a.txt", "character", **settings), cache_dir=cache)
    train, validation = found.split("train"), found.split("validation")
    assert train.tokens.tolist() == [10, *(n % 10 for n in range(24)), 10]
    assert validation.tokens.tolist() == [10, *range(4, 10), 10]
    assert train.document_starts.tolist() == validation.document_starts.tolist() == [0]


def test_a_tokenizer_from_a_file(folder: pathlib.Path, cache: pathlib.Path) -> None:
    byte = train_tokenizer(TokenizerConfig("byte"), [])
    byte.save(folder.parent / "tokenizer.json")
    tokenizer = TokenizerConfig("file", path=str(folder.parent / "tokenizer.json"))
    found = prepare_text(TextDataConfig(str(folder), tokenizer=tokenizer), cache_dir=cache)
    assert found.digest == prepare_text(config(folder), cache_dir=cache).digest


def test_only_the_first_bytes_are_read(folder: pathlib.Path, cache: pathlib.Path) -> None:
    found = prepare_text(config(folder, max_bytes=100), cache_dir=cache)
    assert found.split("train").num_bytes + found.split("validation").num_bytes == 100


def test_splits_that_are_not_there(folder: pathlib.Path, cache: pathlib.Path) -> None:
    found = prepare_text(config(folder), cache_dir=cache)
    with pytest.raises(UserError, match=r"split 'test': .* train, validation; set data\.test_path"):
        found.split("test")
    with pytest.raises(UserError, match=r"split 'dev': .* only train, validation; choose"):
        found.split("dev")


def test_text_without_words(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    (tmp_path / "train").write_text("word")
    (tmp_path / "validation").write_text(" \t")
    settings = {"validation_path": str(tmp_path / "validation")}
    with pytest.raises(UserError, match="the validation split: has no words in it"):
        prepare_text(config(tmp_path / "train", "word", **settings), cache_dir=cache)


def test_a_cache_in_no_folder(folder: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"the data cache .*00\.txt"):
        prepare_text(config(folder, cache_dir=str(folder / "00.txt")))


def test_a_bad_file_is_an_error_and_nothing_is_kept(
    folder: pathlib.Path, cache: pathlib.Path
) -> None:
    (folder / "99.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"99\.txt: not UTF-8"):
        prepare_text(config(folder), cache_dir=cache)
    assert not [path for path in cache.glob("tokens-*") if path.suffix != ".lock"]


def test_compressors_get_the_text_of_the_split(folder: pathlib.Path, cache: pathlib.Path) -> None:
    found = prepare_text(config(folder), cache_dir=cache)
    stream = found.split("validation")
    text = found.tokenizer.decode(stream.tokens).encode()
    expected = 8 * len(gzip.compress(text, 9)) / stream.num_bytes
    assert found.compressed_bits_per_byte("validation")["gzip -9"] == expected


def test_what_is_read_is_a_tokenizer(folder: pathlib.Path, cache: pathlib.Path) -> None:
    assert isinstance(prepare_text(config(folder), cache_dir=cache).tokenizer, Tokenizer)
