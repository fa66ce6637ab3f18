"""The manifest of a checkpoint: its step, and the size and the SHA-256 of each of its files."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from etils import epath

from train.errors import UserError
from train.run_folder.folder import replace_atomically
from train.run_folder.regular_files import MAX_MANIFEST_BYTES, open_regular, read_bytes

VerifyMode = Literal["auto", "sizes", "full"]


MANIFEST_NAME = "manifest.json"


AUTO_VERIFY_BYTES = 4 * 2**30
"""Up to so many, `auto` looks at digests too: ten seconds or less, on one core."""


_CHUNK = 2**22


_THREADS = 4


_DIGEST = re.compile("[0-9a-f]{64}")


class FileEntry(NamedTuple):
    """Size and digest of one file."""

    bytes: int
    sha256: str


FileEntries = Mapping[str, FileEntry]
"""By their paths within the checkpoint, with slashes."""


def list_files(folder: epath.Path) -> list[str]:
    """All that a manifest lists, in a fixed order."""
    found = []
    waiting = [folder]
    while waiting:
        for path in waiting.pop().iterdir():
            if path.is_dir():
                waiting.append(path)
            else:
                found.append(path.relative_to(folder).as_posix())
    return sorted(name for name in found if not name.startswith(MANIFEST_NAME))


def hash_files(folder: epath.Path, files: Iterable[str]) -> dict[str, FileEntry]:
    """Reads files, and says what they are (OSError: one cannot be read)."""
    files = list(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(files, pool.map(lambda name: _measured(folder / name), files), strict=True))


def serialize_manifest(files: FileEntries, checkpoint: str = "") -> str:
    """Return the manifest as it is on disk: there is one way to write each.

    Args:
      files: What the files must be.
      checkpoint: The name of the checkpoint's folder: its step.
    """
    plain = {name: files[name]._asdict() for name in sorted(files)}
    return json.dumps({"checkpoint": checkpoint, "files": plain}, indent=1) + "\n"


def parse_manifest(text: str) -> dict[str, FileEntry]:
    """Return the files again (ValueError: not, to the last character, what `to_text` writes)."""
    return _parsed(text)[0]


def _parsed(text: str) -> tuple[dict[str, FileEntry], str]:
    """Return the files, and the name of the checkpoint's folder."""
    try:
        whole = json.loads(text)
        plain, checkpoint = whole["files"], whole["checkpoint"]
        files = {name: FileEntry(each["bytes"], each["sha256"]) for name, each in plain.items()}
        sound = (
            all(map(_sound, files, files.values()))
            and serialize_manifest(files, checkpoint) == text
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError("is no manifest") from error
    if not sound:
        raise ValueError("is no manifest")
    return files, checkpoint


def write_manifest(folder: epath.Path, files: FileEntries) -> None:
    """Makes a checkpoint count. At every moment there is a whole manifest or none."""
    path = folder / MANIFEST_NAME
    remote = "://" in os.fspath(path)
    replace_atomically(
        path if remote else pathlib.Path(path), serialize_manifest(files, folder.name).encode()
    )


def find_manifest_problem(folder: epath.Path, verify: VerifyMode) -> str | None:
    """Return how a checkpoint differs from its manifest, in a few words; None if it does not."""
    try:
        files, checkpoint = _parsed(read_bytes(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES).decode())
    except FileNotFoundError:
        return "has no manifest"
    except (OSError, UserError, ValueError):
        return f"{MANIFEST_NAME} is damaged"
    if checkpoint != folder.name:
        return f"is the checkpoint of step {checkpoint}, under another name"
    for name, file in files.items():
        if wrong := _size_problem(folder / name, file):
            return f"{name} {wrong}"
    small = sum(file.bytes for file in files.values()) <= AUTO_VERIFY_BYTES
    if verify == "full" or (verify == "auto" and small):
        return _digest_problem(folder, files)
    return None


def _size_problem(path: epath.Path, file: FileEntry) -> str | None:
    try:
        found = path.stat().length
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None if found == file.bytes else f"has {found:,} bytes and not {file.bytes:,}"


def _digest_problem(folder: epath.Path, files: FileEntries) -> str | None:
    try:
        found = hash_files(folder, files)
    except UserError:
        return "has what is no regular file"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    wrong = [name for name, file in files.items() if found[name] != file]
    return f"{wrong[0]} has other bytes than were saved" if wrong else None


def _measured(path: epath.Path) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def _sound(name: str, file: FileEntry) -> bool:
    """Return True for a sound entry, whose file lies within the checkpoint."""
    parts = pathlib.PurePosixPath(name).parts
    inside = parts and not name.startswith("/") and ".." not in parts and "\0" not in name
    return bool(inside and type(file.bytes) is int and _DIGEST.fullmatch(file.sha256))
