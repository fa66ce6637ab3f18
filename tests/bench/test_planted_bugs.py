"""Every planted bug of the drill matches the source, and its tests exist."""

import pytest

from bench.drills.planted_bugs import BUGS, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_text_occurs_once_and_tests_exist(bug: Bug) -> None:
    assert (ROOT / bug.file).read_text().count(bug.right) == 1
    assert bug.right != bug.wrong
    for name in bug.tests.split():
        assert (ROOT / "tests" / name).exists(), name
