import pytest

from train.checkpoint.retention import RetentionPolicy

STEPS = [3, 6, 9, 12, 15, 18, 20]


def test_newest_are_kept() -> None:
    assert RetentionPolicy(keep_last=2).steps_to_keep(STEPS) == {18, 20}
    assert RetentionPolicy(keep_last=9).steps_to_keep(STEPS) == set(STEPS)
    assert RetentionPolicy().steps_to_keep([]) == set()


def test_each_rule_keeps_a_checkpoint() -> None:
    assert RetentionPolicy(keep_every=6).steps_to_keep(STEPS) == {6, 12, 18, 20}
    assert RetentionPolicy(save_every=3, keep_last_due=2).steps_to_keep(STEPS) == {15, 18, 20}
    assert RetentionPolicy(save_every=3, keep_last_due=1).steps_to_keep(STEPS) == {20}
    assert RetentionPolicy(save_every=3, keep_min_age=5).steps_to_keep(STEPS) == {12, 18, 20}
    assert RetentionPolicy(best_step=9).steps_to_keep(STEPS) == {9, 20}
    assert RetentionPolicy(pinned_steps={3, 4}).steps_to_keep(STEPS) == {3, 20}


@pytest.mark.parametrize(("every", "apart"), [(1, 5), (3, 5), (5, 5), (8, 5), (7, 50)])
def test_one_is_old_enough_for_a_rollback(every: int, apart: int) -> None:
    """At any step there is a checkpoint far enough back for a rollback, and not much further."""
    retention = RetentionPolicy(save_every=every, keep_min_age=apart)
    kept: set[int] = set()
    for step in range(1, 400):
        if step % every == 0:
            kept = retention.steps_to_keep({*kept, step})
        if step > 2 * (apart + every):
            ages = [step - old for old in kept if step - old >= apart]
            assert ages
            assert min(ages) < 2 * (apart + every)
        assert len(kept) <= 3
