import errno
import os
from pathlib import Path

import pytest

from tests.train.object_store import bucket as bucket
from train.errors import UserError
from train.recovery.rollback_record import Rollback, RollbackRecord
from train.run_folder.folder import RunFolder

ROLLBACK = Rollback(first=26, step=27, checkpoint=16, cursor=30, rate=0.5, attempts=2)


def test_record_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    assert RollbackRecord.read(path) == RollbackRecord()
    assert RollbackRecord().last is None
    record = RollbackRecord((Rollback(1, 2, 0, 9, 1.0, 1), ROLLBACK), cleared=False)
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


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"rollbacks": [{"step": 1}], "cleared": true}', '{"rollbacks": 3}'],
)
def test_damaged_record_raises(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recovery.json"
    path.write_text(text)
    with pytest.raises(UserError, match="restore the original file") as caught:
        RollbackRecord.read(path)
    assert len(str(caught.value).splitlines()) == 1
