import gzip
import itertools
import lzma
import os
import pathlib
from typing import Any

import pytest

from tests.train.data.formats import contents
from train.data import corpus, text_files
from train.data.corpus import compressed_bits_per_byte, prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig, TokenizerKind
from train.data.files import Notes, find_files
from train.data.text_splits import TextSource, TextSplits, choose_held_out_documents, find_sources
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError


def source_of(path: object, **settings: Any) -> TextSource:
    config = TextDataConfig(str(path), **settings)
    return find_sources(config, "data", Notes())["train"]


def test_text_can_be_read_repeatedly(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    source = source_of(tmp_path, max_bytes=3)
    assert contents(source.documents()) == contents(source.documents()) == [("a.txt", "fir")]


def test_empty_text_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    for path in (tmp_path, tmp_path / "a.txt"):
        source = source_of(path)
        with pytest.raises(UserError, match=f"data.path {path}: is empty; give"):
            list(source.documents())


def test_fingerprint_depends_on_files_and_settings(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("first")

    def fingerprint(field: str = "text", limit_bytes: int = 0) -> object:
        return source_of(tmp_path, text_field=field, max_bytes=limit_bytes).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(field="body") != first
    assert fingerprint(limit_bytes=1) != first
    (tmp_path / "b.txt").write_text("second")
    assert fingerprint() != first


def test_library_has_topics_and_source_once() -> None:
    source = source_of("python:library")
    texts = dict(contents(source.documents()))
    assert list(texts) == [each.name for each in source.documents()]
    assert "topics/assert" in texts
    assert texts["this.py"].startswith('s = """Gur Mra bs Clguba')
    assert sum(len(text.encode()) for text in texts.values()) > 6_000_000
    assert not any("_sysconfigdata" in name for name in texts)
    folders = {part for name in texts for part in name.split("/")[:-1]}
    assert {"json", "asyncio", "topics"} <= folders
    assert not folders & {"test", "tests", "site-packages", "idlelib", "pydoc_data", "encodings"}


def test_library_files_in_other_encodings_are_skipped(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.py").write_bytes(b"# \xe9")
    (tmp_path / "b.py").write_bytes(b"# b")
    files = find_files(str(tmp_path), "data.path")
    documents = [doc for doc in text_files.library_documents(files) if "topics/" not in doc.name]
    assert contents(documents) == [("b.py", "# b")]


def texts(splits: TextSplits, name: str) -> list[str]:
    return [document.text for document in splits.documents(name)]


def test_tail_matches_nanogpt(tmp_path: pathlib.Path) -> None:
    text = "".join(chr(ord("a") + n % 26) for n in range(1_115_394))  # as many as Shakespeare
    (tmp_path / "a.txt").write_text(text)
    splits = TextSplits.find(TextDataConfig(str(tmp_path / "a.txt"), split_method="tail"))
    (train,), (validation,) = texts(splits, "train"), texts(splits, "validation")
    assert (len(train), len(validation)) == (1_003_854, 111_540)
    assert train + validation == text


def test_tail_spans_all_documents(tmp_path: pathlib.Path) -> None:
    for name, text in (("a", "éééé"), ("b", "bbbb"), ("c", "cc")):
        (tmp_path / name).write_text(text)
    splits = TextSplits.find(
        TextDataConfig(str(tmp_path), split_method="tail", validation_fraction=0.4)
    )
    assert contents(splits.documents("train")) == [("a", "éééé"), ("b", "bb")]
    assert contents(splits.documents("validation")) == [("b", "bb"), ("c", "cc")]


def test_single_document_is_split_at_its_tail(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    splits = TextSplits.find(TextDataConfig(str(tmp_path), validation_fraction=0.2))
    assert (texts(splits, "train"), texts(splits, "validation")) == (["01234567"], ["89"])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"1 characters are too few to hold out 0\.1 of them"):
        texts(TextSplits.find(TextDataConfig(str(tmp_path))), "train")


def test_held_out_documents_depend_on_names_only() -> None:
    sizes = [(f"document {n}", 7) for n in range(101)]
    drawn = {sizes[n][0] for n in choose_held_out_documents(sizes, 0.25)}
    assert len(drawn) == 25
    assert {sizes[::-1][n][0] for n in choose_held_out_documents(sizes[::-1], 0.25)} == drawn
    renamed = [(name + "!", size) for name, size in sizes]
    assert choose_held_out_documents(sizes, 0.25) != choose_held_out_documents(renamed, 0.25)


@pytest.mark.parametrize(
    ("sizes", "fraction", "drawn"),
    [
        ([("a", 90), ("b", 10)], 0.1, {1}),
        ([("a", 10), ("b", 90)], 0.1, {0}),
        ([("a", 3), ("b", 2), ("c", 3)], 0.1, {1}),  # none fits
        ([("a", 5), ("b", 5)], 0.999, None),  # never all
    ],
)
def test_each_split_has_at_least_one_document(
    sizes: list[tuple[str, int]], fraction: float, drawn: set[int] | None
) -> None:
    actual = choose_held_out_documents(sizes, fraction)
    assert 0 < len(actual) < len(sizes)
    assert drawn is None or actual == drawn


def test_validation_path_leaves_training_text_whole(tmp_path: pathlib.Path) -> None:
    for name in ("train", "validation", "test"):
        (tmp_path / name).write_text(name)
    train, validation, test = (str(tmp_path / name) for name in ("train", "validation", "test"))
    splits = TextSplits.find(TextDataConfig(train, validation_path=validation, test_path=test))
    assert splits.names == ("train", "validation", "test")
    for name in splits.names:
        assert texts(splits, name) == [name]
    held_out = TextSplits.find(TextDataConfig(train, test_path=test, validation_fraction=0.21))
    assert held_out.names == ("train", "validation", "test")
    assert (texts(held_out, "train"), texts(held_out, "validation")) == (["tra"], ["in"])
    assert held_out.fingerprint()["train"] == splits.fingerprint()["train"]
    assert held_out.fingerprint()["validation"] != splits.fingerprint()["validation"]


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


def test_whole_documents_are_held_out_and_encoded(folder: pathlib.Path) -> None:
    result = prepare_text(config(folder, validation_fraction=0.3))
    train, validation = result.split("train"), result.split("validation")
    for name, remedy in (("test", r"set data\.test_path"), ("dev", "choose one of these")):
        with pytest.raises(UserError, match=f"only train, validation; {remedy}"):
            result.split(name)
    texts = {file.read_text() for file in folder.iterdir()}
    assert train.num_bytes + validation.num_bytes == sum(map(len, texts))
    assert 0 < validation.num_bytes <= 0.3 * (train.num_bytes + validation.num_bytes)
    for stream in (train, validation):
        ends = [*stream.document_starts, len(stream.tokens) - 1]
        decoded = [
            result.tokenizer.decode(stream.tokens[start:end])
            for start, end in itertools.pairwise(ends)
        ]
        assert len(decoded) == len(set(decoded))
        assert set(decoded) <= texts
        texts -= set(decoded)
    assert not texts


def test_second_preparation_uses_the_cache(
    folder: pathlib.Path, cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_text(config(folder, "bpe", cache_dir=str(cache)))
    with monkeypatch.context() as patch:
        for name in ("write_stream", "train_tokenizer"):
            patch.delattr(corpus, name)
        again = prepare_text(config(folder, "bpe", cache_dir=str(cache)))
        own = prepare_text(config(folder, "word", cache_dir=str(cache)), tokenizer=first.tokenizer)
    assert first.digest == again.digest == own.digest
    assert again.split("train").tokens.tolist() == first.split("train").tokens.tolist()
    os.utime(folder / "00.txt", ns=(1, 1))
    with monkeypatch.context() as patch:
        patch.delattr(corpus, "train_tokenizer")
        with pytest.raises(NameError):
            prepare_text(config(folder, "bpe", cache_dir=str(cache)))
    assert prepare_text(config(folder, "bpe", cache_dir=str(cache))).digest == first.digest
    (folder / "00.txt").write_text("other")
    assert prepare_text(config(folder, "bpe", cache_dir=str(cache))).digest != first.digest


def test_damaged_cache_is_rewritten(folder: pathlib.Path, cache: pathlib.Path) -> None:
    first = prepare_text(config(folder, cache_dir=str(cache)))
    (entry,) = (path for path in cache.glob("tokens-*") if path.is_dir())
    full = (entry / "train.tokens").read_bytes()
    for name, content in (("train.tokens", full[:-2]), ("corpus.json", b'{"train": {')):
        (entry / name).write_bytes(content)
        assert prepare_text(config(folder, cache_dir=str(cache))).digest == first.digest
        assert (entry / "train.tokens").read_bytes() == full


def prepare_two(folder: pathlib.Path, kind: TokenizerKind, train: str, validation: str) -> Any:
    (folder / "train").write_text(train)
    (folder / "validation").write_text(validation)
    return prepare_text(config(folder / "train", kind, validation_path=f"{folder}/validation"))


def test_tokenizer_is_trained_on_the_training_split(tmp_path: pathlib.Path) -> None:
    result = prepare_two(tmp_path, "word", "aa bb", "aa cc")
    assert result.split("train").tokens.tolist() == [1, 2, 3, 1]
    assert result.split("validation").tokens.tolist() == [1, 2, 0, 1]
    with pytest.raises(UserError, match="the validation split: has no words in it"):
        prepare_two(tmp_path, "word", "word", " \t")


def test_alphabet_covers_all_splits(tmp_path: pathlib.Path) -> None:
    result = prepare_two(tmp_path, "character", "abc", "é")
    assert result.tokenizer.vocab_size == 5
    assert result.split("validation").tokens.tolist() == [4, 3, 4]


def test_tokenizer_from_a_file(folder: pathlib.Path) -> None:
    byte = train_tokenizer(TokenizerConfig("byte"), [])
    byte.save(folder.parent / "tokenizer.json")
    tokenizer = TokenizerConfig("file", path=str(folder.parent / "tokenizer.json"))
    result = prepare_text(TextDataConfig(str(folder), tokenizer=tokenizer))
    assert result.digest == prepare_text(config(folder)).digest
    # Another separator, which is not in tokenizer.json.
    (folder.parent / "generation_config.json").write_text('{"eos_token_id": 0}')
    other = prepare_text(TextDataConfig(str(folder), tokenizer=tokenizer))
    assert other.split("train").tokens[-1] == 0


def test_invalid_file_leaves_no_cache(folder: pathlib.Path, cache: pathlib.Path) -> None:
    (folder / "99.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"99\.txt:1: not UTF-8"):
        prepare_text(config(folder, cache_dir=str(cache)))
    assert not [path for path in cache.glob("tokens-*") if path.suffix != ".lock"]


def test_bits_per_byte_match_gzip_and_xz(folder: pathlib.Path) -> None:
    texts = [f"{n} é {n * n}\n" for n in range(997)]
    full = "".join(texts).encode()
    assert compressed_bits_per_byte(texts) == {
        "gzip -9": 8 * len(gzip.compress(full, 9)) / len(full),
        "xz -9": 8 * len(lzma.compress(full, preset=9)) / len(full),
    }
    result = prepare_text(config(folder))
    stream = result.split("validation")
    text = result.tokenizer.decode(stream.tokens).encode()
    expected = 8 * len(gzip.compress(text, 9)) / stream.num_bytes
    assert result.compressed_bits_per_byte("validation")["gzip -9"] == expected
