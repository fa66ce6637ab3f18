import errno
import pathlib
import subprocess
import sys

import pytest

from train.errors import UserError
from train.files import cache_folder, cache_key, get_or_create

# Waits for a word from the test, then writes: a line in the log, and half of the folder before
# the other half.
WRITER = """
import pathlib, sys
from train.files import get_or_create

folder, log, stop = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]

def write(partial):
    with log.open("a") as file:
        file.write("written\\n")
    (partial / "half").write_text("half")
    if stop == "stop":
        print("in the middle", flush=True)
        sys.stdin.readline()
    (partial / "whole").write_text("whole")

sys.stdin.readline()
print((get_or_create(folder, write) / "whole").read_text(), flush=True)
"""


def start(folder: pathlib.Path, stop: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(folder.parent / "log"), stop],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_one_of_four_processes_writes(tmp_path: pathlib.Path) -> None:
    processes = [start(tmp_path / "entry") for _ in range(4)]
    for process in processes:
        go(process)
    assert [process.communicate()[0] for process in processes] == ["whole\n"] * 4
    assert (tmp_path / "log").read_text() == "written\n"


def test_incomplete_cache_is_never_used(tmp_path: pathlib.Path) -> None:
    with start(tmp_path / "entry", "stop") as killed:
        go(killed)
        assert killed.stdout is not None
        assert killed.stdout.readline() == "in the middle\n"
        killed.kill()
    assert not (tmp_path / "entry").exists()
    with start(tmp_path / "entry") as process:
        assert process.communicate("\n")[0] == "whole\n"
    assert (tmp_path / "log").read_text() == "written\n" * 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["entry", "entry.lock", "log"]


def test_full_disk_is_one_line_and_leaves_no_files(tmp_path: pathlib.Path) -> None:
    def write(partial: pathlib.Path) -> None:
        (partial / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=f"cache {tmp_path}: No space left on device; make room"):
        get_or_create(tmp_path / "entry", write)
    assert [file.name for file in tmp_path.iterdir()] == ["entry.lock"]


def test_unwritable_cache_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache .*/file: .*; make room there, or set data\.cache"):
        get_or_create(tmp_path / "file" / "entry", lambda partial: None)


def test_damaged_entry_is_rewritten(tmp_path: pathlib.Path) -> None:
    def write(partial: pathlib.Path) -> None:
        (partial / "file").write_text("good")

    def whole(folder: pathlib.Path) -> bool:
        return folder.is_dir() and (folder / "file").read_text() == "good"

    entry = get_or_create(tmp_path / "entry", write, whole)
    (entry / "file").write_text("bad")
    (entry / "other").write_text("bad")
    assert [file.read_text() for file in get_or_create(entry, write, whole).iterdir()] == ["good"]


def test_existing_entry_is_reused(tmp_path: pathlib.Path) -> None:
    def write(partial: pathlib.Path) -> None:
        raise AssertionError

    (tmp_path / "entry").mkdir()
    assert get_or_create(tmp_path / "entry", write) == tmp_path / "entry"


def test_entry_written_while_waiting_is_reused(tmp_path: pathlib.Path) -> None:
    def write(partial: pathlib.Path) -> None:
        raise AssertionError

    answers = iter([False, True])  # before the lock is had, and after
    assert get_or_create(tmp_path / "entry", write, lambda _: next(answers)) == tmp_path / "entry"


def test_keys_differ_by_value() -> None:
    assert cache_key(1, {"a": 2, "b": None}) == cache_key(1, {"b": None, "a": 2})
    assert len({cache_key(1, 2), cache_key(2, 1), cache_key([1, 2]), cache_key("1", 2)}) == 4


def test_cache_location(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("TRANSFORMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert str(cache_folder("")) == "/home/me/.cache/linen-transformer"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(cache_folder("")) == "/caches/linen-transformer"
    monkeypatch.setenv("TRANSFORMER_CACHE", "~/mine")
    assert str(cache_folder("")) == "/home/me/mine"
    assert str(cache_folder("$XDG_CACHE_HOME/given")) == "/caches/given"
