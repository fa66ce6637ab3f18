"""Checkpoints that were changed after they were saved."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from bench.drills.damage import WITHOUT_DATA
from tests.train.checkpoint.support import abstract, assert_same, make_state, save
from train.checkpoint.manager import CheckpointManager, SearchResult
from train.checkpoint.manifest import ManifestHandler, manifest_path
from train.checkpoint.retention import RetentionPolicy
from train.errors import UserError


@pytest.mark.parametrize(
    ("file", "problem"),
    [("leaves/metadata", ".+"), ("state/array_metadatas/process_0", "types were lost")],
)
def test_unreadable_checkpoint_is_a_one_line_error(
    file: str, problem: str, tmp_path: pathlib.Path
) -> None:
    """Without its types, a random key would be restored as integers."""
    state = {"key": jax.random.key(0)}
    save(tmp_path, state)
    (tmp_path / "1" / file).unlink()
    # Of the files as they are now, as if the damage was there when they were saved.
    path = manifest_path(epath.Path(tmp_path / "1"))
    path.write_text('{"checkpoint": "1", "arrays": []}')
    ManifestHandler().finalize(path.parent)
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(UserError, match=rf"/1: cannot be read \({problem}\)") as caught,
    ):
        checkpoints.restore(1, abstract(state))
    assert "\n" not in str(caught.value)


def test_old_checkpoint_is_removed_after_the_new_one_counts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, finalize = {"w": jnp.ones(3)}, ManifestHandler.finalize

    def look_and_finalize(self: ManifestHandler, folder: epath.Path) -> None:
        assert {path.name for path in tmp_path.iterdir()} == {"1", "2.orbax-checkpoint-tmp"}
        finalize(self, folder)

    with CheckpointManager(tmp_path, RetentionPolicy(keep_last=1)) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        monkeypatch.setattr(ManifestHandler, "finalize", look_and_finalize)
        checkpoints.save(2, state, {})
        checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def damage(folder: pathlib.Path) -> None:
    """Flip one bit of the weights, which Orbax would restore without an error."""
    largest = max((folder / "state" / "d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


def test_modified_checkpoint_is_not_restored(tmp_path: pathlib.Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path, RetentionPolicy(keep_last=3)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state, {})
        checkpoints.wait()
        damage(tmp_path / "3")
        (tmp_path / "2" / "extra" / "metadata").unlink()
        result = checkpoints.find_newest_valid()
        assert result.step == 1
        assert [step for step, _ in result.skipped] == [3, 2]
        assert result.skipped[0].problem.endswith("differs from what was saved")
        assert result.skipped[1].problem == "extra/metadata is missing"
        assert checkpoints.valid_steps([1, 2, 3, 4]) == [1]
        with pytest.raises(UserError, match=r"/3: is damaged \(state/d/.+ differs"):
            checkpoints.restore(3, abstract(state))
        assert_same(checkpoints.restore(1, abstract(state)).state, state)


@pytest.mark.parametrize("file", WITHOUT_DATA)
def test_files_without_data_are_not_needed(file: str, tmp_path: pathlib.Path) -> None:
    state = make_state()
    save(tmp_path, state)
    for damage in (lambda path: path.write_bytes(b"{"), pathlib.Path.unlink):
        damage(tmp_path / "1" / file)
        with CheckpointManager(tmp_path, RetentionPolicy(keep_last=2)) as checkpoints:
            assert checkpoints.find_newest_valid() == SearchResult(1, [])
            assert_same(checkpoints.restore(1, abstract(state)).state, state)
            checkpoints.save(2, state, {})
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.set_aside(2, "other")


def test_step_that_was_set_aside_can_be_saved_again(tmp_path: pathlib.Path) -> None:
    state = {"w": jnp.ones(3)}
    with CheckpointManager(tmp_path, RetentionPolicy(keep_last=2)) as checkpoints:
        for _ in range(2):
            checkpoints.save(2, state, {})
            checkpoints.wait()
            checkpoints.set_aside(2, "damaged")
            assert checkpoints.steps() == []
        checkpoints.save(2, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "damaged-2", "damaged-2-2"]


def test_check_by_size_reads_no_digests(tmp_path: pathlib.Path) -> None:
    save(tmp_path, {"w": jnp.ones(3)})
    damage(tmp_path / "1")
    with CheckpointManager(tmp_path, verify="sizes") as checkpoints:
        assert checkpoints.find_newest_valid().step == 1
    with CheckpointManager(tmp_path, verify="full") as checkpoints:
        assert checkpoints.find_newest_valid().step is None
