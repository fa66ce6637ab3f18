"""The arrays that Orbax wrote are read back before a checkpoint counts."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tensorstore
from etils import epath

from train.checkpoint import commit, tree_paths
from train.checkpoint.commit import check_arrays_readable
from train.checkpoint.manager import CheckpointManager
from train.errors import UserError

STATE = {
    "params": {"a.b": jnp.arange(6.0).reshape(2, 3), "zero": jnp.zeros((300,), jnp.bfloat16)},
    # Outside the index, in which small arrays are stored. The first and the last by name.
    "a": jax.random.normal(jax.random.key(0), (40, 50)),
    "z": jax.random.normal(jax.random.key(1), (40, 50)),
    "key": jax.random.key(0),
    "step": jnp.int32(0),
    "empty": jnp.ones((0, 3)),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(3, STATE, {})
    return folder / "3" / "state"


@pytest.fixture
def arrays(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "state"))


def check(folder: Path, state: Any = STATE, host: int = 0, hosts: int = 1) -> None:
    leaves = tree_paths.named_leaves(state)
    check_arrays_readable(epath.Path(folder), leaves, process_index=host, process_count=hosts)


def test_complete_arrays_pass(arrays: Path) -> None:
    check(arrays)
    for host in range(3):
        check(arrays, host=host, hosts=3)


def test_missing_index_is_detected(arrays: Path) -> None:
    """Orbax leaves this state if it finds no array to merge."""
    (arrays / "manifest.ocdbt").unlink()
    with pytest.raises(OSError, match="not in the index"):
        check(arrays)


def test_missing_array_is_detected(arrays: Path) -> None:
    with pytest.raises(OSError, match=r"params\.other is not in the index"):
        check(arrays, {"params": {**STATE["params"], "other": jnp.ones(3)}})


def test_missing_chunk_is_detected(arrays: Path) -> None:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{arrays}/"}}
    store = tensorstore.KvStore.open(spec).result()
    assert store.read("z/0.0").result().value
    store.delete_range(tensorstore.KvStore.KeyRange("z/0.0", "z/0.1")).result()
    with pytest.raises(OSError, match="z is not whole"):
        check(arrays)


def test_wrong_array_size_is_detected(arrays: Path) -> None:
    with pytest.raises(OSError, match=r"shape \(4, 3\) was written as \[2, 3\]"):
        check(arrays, {"params": {"a.b": jnp.ones((4, 3))}})


def test_missing_data_files_are_detected(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process whose share they are, whatever the number of reads at a time."""
    for file in (arrays / "ocdbt.process_0" / "d").iterdir():
        file.unlink()
    for reads in (1, 2, 64):
        monkeypatch.setattr(commit, "_READS_IN_FLIGHT", reads)
        with pytest.raises(OSError, match="read"):
            check(arrays)
    failed = []
    for host in range(6):  # as many as arrays, each of one chunk
        try:
            check(arrays, host=host, hosts=6)
        except OSError:
            failed.append(host)
    assert failed == [0, 5]
    monkeypatch.setattr(commit, "AUTO_VERIFY_BYTES", 1000)
    check(arrays)  # too large to be read back


def test_save_without_an_index_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays missing for any reason are detected; here Orbax's glob finds no file of a process."""
    path = type(epath.Path(tmp_path))
    glob, none = path.glob, path("/nowhere")
    monkeypatch.setattr(
        path, "glob", lambda self, what: glob(none if what.startswith("ocdbt") else self, what)
    )
    with (
        pytest.raises(UserError, match=r"/3: could not be written \(.*index"),
        CheckpointManager(tmp_path) as checkpoints,
    ):
        checkpoints.save(3, STATE, {})
    with CheckpointManager(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == []
