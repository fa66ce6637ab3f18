import pathlib

import pytest

from train.data import python_library as library
from train.data.corpus import TextSource
from train.errors import UserError


def test_text_is_read_anew_each_time(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    source = TextSource.find("data.path", str(tmp_path), max_bytes=3)
    assert list(source.documents()) == list(source.documents()) == [("a.txt", "fir")]


def test_no_text_at_all_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    for path in (tmp_path, tmp_path / "a.txt"):
        source = TextSource.find("data.validation_path", str(path))
        with pytest.raises(UserError, match=f"data.validation_path {path}: is empty; give"):
            list(source.documents())


def test_the_fingerprint_depends_on_files_and_settings(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").write_text("first")

    def fingerprint(field: str = "text", limit_bytes: int = 0) -> list[object]:
        path = str(tmp_path)
        return TextSource.find(
            "data.path", path, text_field=field, max_bytes=limit_bytes
        ).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    assert fingerprint(field="body") != first
    assert fingerprint(limit_bytes=1) != first
    (tmp_path / "b.txt").write_text("second")
    assert fingerprint() != first


def test_the_library_has_topics_and_source_and_neither_twice() -> None:
    source = TextSource.find("data.path", "python:library")
    texts = dict(source.documents())
    assert list(texts) == [name for name, _ in source.documents()]
    assert "topics/assert" in texts
    assert texts["this.py"].startswith('s = """Gur Mra bs Clguba')
    assert sum(len(text.encode()) for text in texts.values()) > 6_000_000
    assert not any("_sysconfigdata" in name for name in texts)
    folders = {part for name in texts for part in name.split("/")[:-1]}
    assert {"json", "asyncio", "topics"} <= folders
    assert not folders & {"test", "tests", "site-packages", "idlelib", "pydoc_data", "encodings"}


def test_a_python_without_its_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_help_topics", dict)
    with pytest.raises(UserError, match=r"python:library: .* give data\.path a file"):
        list(library.library_documents(()))


def test_library_files_that_are_not_utf8_are_left_out(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.py").write_bytes(b"# \xe9")
    (tmp_path / "b.py").write_bytes(b"# b")
    files = TextSource.find("data.path", str(tmp_path)).files
    documents = [doc for doc in library.library_documents(files) if "topics/" not in doc.name]
    assert documents == [("b.py", "# b")]
