import pytest

from train.checkpoint.discovery import Retention

STEPS = [3, 6, 9, 12, 15, 18, 20]


def test_the_newest_are_kept() -> None:
    assert Retention(keep=2).kept(STEPS) == {18, 20}
    assert Retention(keep=9).kept(STEPS) == set(STEPS)
    assert Retention().kept([]) == set()


def test_every_reason_keeps_one() -> None:
    assert Retention(keep_every=6).kept(STEPS) == {6, 12, 18, 20}
    assert Retention(every=3, average=2).kept(STEPS) == {15, 18, 20}
    assert Retention(every=3, average=1).kept(STEPS) == {20}
    assert Retention(every=3, apart=5).kept(STEPS) == {12, 18, 20}
    assert Retention(best=9).kept(STEPS) == {9, 20}
    assert Retention(pinned={3, 4}).kept(STEPS) == {3, 20}


@pytest.mark.parametrize(("every", "apart"), [(1, 5), (3, 5), (5, 5), (8, 5), (7, 50)])
def test_one_is_old_enough(every: int, apart: int) -> None:
    """Whenever a run stops, it can go back so far, and need not go much further."""
    retention = Retention(every=every, apart=apart)
    kept: set[int] = set()
    for step in range(1, 400):
        if step % every == 0:
            kept = retention.kept({*kept, step})
        if step > 2 * (apart + every):
            ages = [step - old for old in kept if step - old >= apart]
            assert ages
            assert min(ages) < 2 * (apart + every)
        assert len(kept) <= 3
