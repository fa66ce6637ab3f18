from train.checkpoints.retention import Retention

STEPS = [3, 6, 9, 12, 15, 18, 20]


def test_the_newest_are_kept() -> None:
    assert Retention(keep=2).kept(STEPS) == {18, 20}
    assert Retention(keep=9).kept(STEPS) == set(STEPS)
    assert Retention().kept([]) == set()


def test_every_reason_keeps_one() -> None:
    assert Retention(keep_every=6).kept(STEPS) == {6, 12, 18, 20}
    assert Retention(every=3, average=2).kept(STEPS) == {15, 18, 20}
    assert Retention(every=3, average=1).kept(STEPS) == {20}
    assert Retention(best=9).kept(STEPS) == {9, 20}
    assert Retention(pinned={3, 4}).kept(STEPS) == {3, 20}
