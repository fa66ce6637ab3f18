"""The index of the arrays is read before a checkpoint counts."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tensorstore
from etils import epath

from train.checkpoint.manager import CheckpointManager
from train.checkpoint.manifest import check_arrays_complete
from train.errors import UserError

STATE = {
    "params": {"a.b": jnp.arange(6.0).reshape(2, 3), "zero": jnp.zeros((300,), jnp.bfloat16)},
    "z": jax.random.normal(jax.random.key(1), (40, 50)),
    "key": jax.random.key(0),
    "empty": jnp.ones((0, 3)),
}
NAMES = ("params/a.b", "params/zero", "z", "key")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(3, STATE, {})
    return folder / "3" / "state"


@pytest.fixture
def arrays(written: Path, tmp_path: Path) -> epath.Path:
    return epath.Path(shutil.copytree(written, tmp_path / "state"))


def test_complete_arrays_pass(arrays: epath.Path) -> None:
    check_arrays_complete(arrays, NAMES)


def test_missing_index_is_detected(arrays: epath.Path) -> None:
    """Orbax leaves this state if it finds no array to merge."""
    (arrays / "manifest.ocdbt").unlink()
    with pytest.raises(OSError, match="not in the index"):
        check_arrays_complete(arrays, NAMES)


def test_missing_array_is_detected(arrays: epath.Path) -> None:
    with pytest.raises(OSError, match=r"params\.other is not in the index"):
        check_arrays_complete(arrays, [*NAMES, "params/other"])


def test_missing_chunk_is_detected(arrays: epath.Path) -> None:
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{arrays}/"}}
    store = tensorstore.KvStore.open(spec).result()
    assert store.read("z/0.0").result().value
    store.delete_range(tensorstore.KvStore.KeyRange("z/0.0", "z/0.1")).result()
    with pytest.raises(OSError, match="z is not whole"):
        check_arrays_complete(arrays, NAMES)


def test_missing_data_file_is_detected(arrays: epath.Path) -> None:
    """TensorStore gives empty values for its chunks, and no error."""
    for file in arrays.glob("ocdbt.process_*/d/*"):
        file.unlink()
    with pytest.raises(OSError, match="cannot be read back"):
        check_arrays_complete(arrays, NAMES)


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
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.steps() == []
