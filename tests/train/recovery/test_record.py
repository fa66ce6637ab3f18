from pathlib import Path

import pytest

from train.errors import UserError
from train.recovery.plan import Rollback
from train.recovery.record import Record

ROLLBACK = Rollback(first=26, step=27, checkpoint=16, cursor=30, rate=0.5, tries=2)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    assert Record.read(path) == Record()
    assert Record().last is None
    record = Record((Rollback(1, 2, 0, 9, 1.0, 1), ROLLBACK), cleared=False)
    record.write(path)
    assert Record.read(path) == record
    assert record.last == ROLLBACK
    assert [each.name for each in tmp_path.iterdir()] == ["recovery.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"rollbacks": [{"step": 1}], "cleared": true}', '{"rollbacks": 3}'],
)
def test_a_damaged_one_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recovery.json"
    path.write_text(text)
    with pytest.raises(UserError, match="put the file back as it was") as caught:
        Record.read(path)
    assert len(str(caught.value).splitlines()) == 1
