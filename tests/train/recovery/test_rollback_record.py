import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.train.object_store import bucket as bucket
from train.errors import UserError
from train.rollback import Rollback, RollbackRecord
from train.run_folder.folder import RunFolder

ROLLBACK = Rollback(first=26, step=27, checkpoint=16, cursor=30, rate=0.5, attempts=2)


def test_record_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    assert RollbackRecord.read(path) == RollbackRecord()
    assert RollbackRecord().last is None
    smallest = Rollback(first=1, step=1, checkpoint=0, cursor=0, rate=1.0, attempts=1)
    most = 2**31 - 1
    largest = Rollback(most, most, most, most, rate=1e-9, attempts=most)
    record = RollbackRecord((smallest, largest, ROLLBACK), cleared=False)
    record.write(path)
    assert RollbackRecord.read(path) == record
    assert record.last == ROLLBACK
    assert [each.name for each in tmp_path.iterdir()] == ["recovery.json"]


def test_record_in_an_object_store(bucket: str) -> None:
    path = RunFolder.create(f"{bucket}/runs/first").rollback_record
    assert RollbackRecord.read(path) == RollbackRecord()
    RollbackRecord((ROLLBACK,)).write(path)
    assert RollbackRecord.read(path).last == ROLLBACK


def test_failed_write_keeps_the_previous_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recovery.json"
    before = RollbackRecord((ROLLBACK,))
    before.write(path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        RollbackRecord((ROLLBACK, ROLLBACK)).write(path)
    assert RollbackRecord.read(path) == before


def assert_damaged(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(UserError, match="restore the original file"):
        RollbackRecord.read(path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"rollbacks": [{"step": 1}], "cleared": true}', '{"rollbacks": 3}'],
)
def test_damaged_record_raises(tmp_path: Path, text: str) -> None:
    assert_damaged(tmp_path / "recovery.json", text)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("first", [0, 2**31, 1.0]),
        ("step", [0, 2**31]),
        ("checkpoint", [-1, 2**31]),
        ("cursor", [-1, 2**31, True]),
        ("attempts", [0, 2**31]),
        ("rate", [0, 1.5, True]),
    ],
)
def test_number_out_of_range_raises(tmp_path: Path, name: str, values: list[Any]) -> None:
    for value in values:
        rollback = {**dataclasses.asdict(ROLLBACK), name: value}
        record = {"rollbacks": [rollback], "cleared": True}
        assert_damaged(tmp_path / "recovery.json", json.dumps(record))
