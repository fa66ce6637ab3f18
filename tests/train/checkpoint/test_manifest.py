import hashlib
from pathlib import Path

import pytest
from etils import epath

from tests.train.object_store import bucket as bucket
from train.checkpoint import manifest
from train.checkpoint.discovery import list_steps
from train.checkpoint.manifest import FileEntry
from train.checkpoint.retention import delete_checkpoint

FILES = {"a/b": b"three", "c": b"", "d/e/ü": bytes(range(256))}


@pytest.fixture
def folder(tmp_path: Path) -> epath.Path:
    for name, data in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    folder = epath.Path(tmp_path)
    manifest.write_manifest(folder, manifest.hash_files(folder, manifest.list_files(folder)))
    return folder


def test_manifest_has_size_and_digest_of_every_file(folder: epath.Path) -> None:
    actual = manifest.parse_manifest((folder / "manifest.json").read_text())
    assert actual == {
        name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()
    }
    assert manifest.find_manifest_problem(folder, "full") is None
    assert {path.name for path in folder.iterdir()} == {"a", "c", "d", "manifest.json"}


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a/b", b"thre", "a/b has 4 bytes instead of 5"),
        ("a/b", None, "a/b is missing"),
        ("manifest.json", None, "has no manifest"),
        ("manifest.json", b"{}", "manifest.json is damaged"),
        ("manifest.json", b"\xff", "manifest.json is damaged"),
        ("manifest.json", b"[" * 100_000, "manifest.json is damaged"),
    ],
)
def test_wrong_sizes_are_detected_without_reading(
    folder: epath.Path, name: str, data: bytes | None, why: str
) -> None:
    file = folder / name
    file.unlink()
    if data is not None:
        file.write_bytes(data)
    assert manifest.find_manifest_problem(folder, "sizes") == why


def test_changed_bytes_are_detected_by_digest(
    folder: epath.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a/b").write_bytes(b"thsee")
    why = "a/b differs from what was saved"
    assert manifest.find_manifest_problem(folder, "sizes") is None
    assert manifest.find_manifest_problem(folder, "full") == why
    assert manifest.find_manifest_problem(folder, "auto") == why
    monkeypatch.setattr(manifest, "AUTO_VERIFY_BYTES", 260)  # there are 261
    assert manifest.find_manifest_problem(folder, "auto") is None


def test_every_flipped_bit_of_the_manifest_is_detected(folder: epath.Path) -> None:
    path = folder / "manifest.json"
    full = path.read_bytes()
    for place in range(len(full)):
        torn = bytearray(full)
        torn[place] ^= 1 << place % 8
        path.write_bytes(torn)
        assert manifest.find_manifest_problem(folder, "full") is not None


def test_renamed_checkpoint_raises(folder: epath.Path) -> None:
    moved = folder.rename(folder.parent / "50")
    assert manifest.find_manifest_problem(moved, "sizes") == (
        f"is the checkpoint of step {folder.name}, under another name"
    )


def test_manifest_in_an_object_store(folder: epath.Path, bucket: str) -> None:
    remote = epath.Path(f"{bucket}/checkpoints/1")
    for name, data in FILES.items():
        (remote / name).parent.mkdir(parents=True, exist_ok=True)
        (remote / name).write_bytes(data)
    manifest.write_manifest(remote, manifest.hash_files(remote, manifest.list_files(remote)))
    texts = [(each / manifest.MANIFEST_NAME).read_text() for each in (remote, folder)]
    assert texts[0] == texts[1].replace(f'"{folder.name}"', f'"{remote.name}"')
    assert manifest.find_manifest_problem(remote, "full") is None
    (remote / "c").write_bytes(b"more")
    assert manifest.find_manifest_problem(remote, "sizes") == "c has 4 bytes instead of 0"
    assert list_steps(remote.parent) == [1]
    (remote / manifest.MANIFEST_NAME).unlink()
    assert list_steps(remote.parent) == [1]  # it was complete
    delete_checkpoint(remote.parent, 1)
    assert list(remote.parent.iterdir()) == []
