"""Files of a run are written atomically."""

import pathlib
import resource

import pytest

from train.errors import UserError
from train.runtime.writing import write_atomically


def test_failed_write_keeps_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    write_atomically(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"config\.json: cannot be written \(File too large\)"):
            write_atomically(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_text_is_written_as_utf8(tmp_path: pathlib.Path) -> None:
    write_atomically(tmp_path / "samples.txt", "κόσμε\r\n")
    assert (tmp_path / "samples.txt").read_bytes() == "κόσμε\r\n".encode()
