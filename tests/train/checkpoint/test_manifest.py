import hashlib
import json
from pathlib import Path

import pytest
from etils import epath

from tests.train.object_store import bucket as bucket
from train.checkpoint import manifest
from train.checkpoint.manifest import ManifestHandler, find_manifest_problem, manifest_path

FILES = {"state/a/b": b"three", "leaves/metadata": b"", "extra/ü": bytes(range(256))}


def write(folder: epath.Path) -> epath.Path:
    """Write a checkpoint of `FILES` with its manifest, as Orbax's items."""
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "_CHECKPOINT_METADATA").write_text("{}")  # changed by Orbax after the items
    item = folder / manifest.MANIFEST_ITEM
    item.mkdir()
    (item / "metadata").write_text(json.dumps({"checkpoint": folder.name, "arrays": []}))
    ManifestHandler().finalize(item)
    return folder


@pytest.fixture(autouse=True)
def no_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "check_arrays_complete", lambda folder, arrays: None)


@pytest.fixture
def folder(tmp_path: Path) -> epath.Path:
    return write(epath.Path(tmp_path / "7"))


def test_manifest_has_size_and_digest_of_every_file(folder: epath.Path) -> None:
    assert json.loads(manifest_path(folder).read_text()) == {
        "checkpoint": "7",
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in FILES.items()
        },
    }
    assert find_manifest_problem(folder, "full") is None


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("state/a/b", b"thre", "state/a/b has 4 bytes instead of 5"),
        ("state/a/b", None, "state/a/b is missing"),
        ("manifest/metadata", None, "has no manifest"),
        ("manifest/metadata", b"{}", "its manifest is damaged"),
        ("manifest/metadata", b"\xff", "its manifest is damaged"),
        ("manifest/metadata", b"[" * 100_000, "its manifest is damaged"),
    ],
)
def test_wrong_sizes_are_detected_without_reading(
    folder: epath.Path, name: str, data: bytes | None, why: str
) -> None:
    file = folder / name
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    assert find_manifest_problem(folder, "sizes") == why


def test_changed_bytes_are_detected_by_digest(
    folder: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "state/a/b").write_bytes(b"thsee")
    why = "state/a/b differs from what was saved"
    assert find_manifest_problem(folder, "sizes") is None
    assert find_manifest_problem(folder, "full") == why
    assert find_manifest_problem(folder, "auto") == why
    monkeypatch.setattr(manifest, "AUTO_VERIFY_BYTES", 260)  # there are 261
    assert find_manifest_problem(folder, "auto") is None


def test_every_flipped_bit_of_the_manifest_is_detected(folder: epath.Path) -> None:
    path = manifest_path(folder)
    full = path.read_bytes()
    for place in range(len(full)):
        torn = bytearray(full)
        torn[place] ^= 1 << place % 8
        path.write_bytes(torn)
        assert find_manifest_problem(folder, "full") is not None


def test_renamed_checkpoint_is_detected(folder: epath.Path) -> None:
    moved = folder.rename(folder.parent / "50")
    assert (
        find_manifest_problem(moved, "sizes") == "is the checkpoint of step 7, under another name"
    )


def test_manifest_in_an_object_store(folder: epath.Path, bucket: str) -> None:
    remote = write(epath.Path(f"{bucket}/checkpoints/7"))
    assert manifest_path(remote).read_text() == manifest_path(folder).read_text()
    assert find_manifest_problem(remote, "full") is None
    (remote / "leaves/metadata").write_bytes(b"more")
    assert find_manifest_problem(remote, "sizes") == "leaves/metadata has 4 bytes instead of 0"
