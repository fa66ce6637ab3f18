"""Manifest of a checkpoint: its step, and the size and SHA-256 digest of each file.

A checkpoint folder counts as a checkpoint only once its manifest exists. The manifest is written
last and atomically, so that a save that is killed at any moment leaves no checkpoint behind. A
restore compares the files with it, because Orbax and TensorStore do not detect a flipped bit.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from etils import epath

from train.run_folder.writing import replace_atomically

STATE_ITEM, LEAVES_ITEM, METADATA_ITEM = "state", "leaves", "extra"
"""Subfolders of a checkpoint: the arrays, their dtypes and shapes, and JSON metadata."""

MANIFEST_NAME = "manifest.json"

VerifyMode = Literal["auto", "sizes", "full"]
"""Comparison before a restore: `sizes` of files, digests too (`full`), or digests up to
`AUTO_VERIFY_BYTES` (`auto`)."""

AUTO_VERIFY_BYTES = 4 * 2**30
"""Largest checkpoint whose digests `auto` verifies. Hashing it takes at most ten seconds a core."""

_CHUNK_BYTES = 2**22
_THREADS = 4
_DIGEST = re.compile("[0-9a-f]{64}")


class FileEntry(NamedTuple):
    """Size and digest of one file."""

    bytes: int
    sha256: str


FileEntries = Mapping[str, FileEntry]
"""Entries by path relative to the checkpoint, with slashes."""


def list_files(folder: epath.Path) -> list[str]:
    """Return the relative paths of all files but the manifest, sorted."""
    files = []
    folders = [folder]
    # Not by `rglob`: characters in the folder's own name may be a pattern.
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir():
                folders.append(path)
            else:
                files.append(path.relative_to(folder).as_posix())
    # By prefix, as the processes of a commit write `manifest.json.0`, `manifest.json.1`, ...
    return sorted(name for name in files if not name.startswith(MANIFEST_NAME))


def hash_files(folder: epath.Path, files: Iterable[str]) -> dict[str, FileEntry]:
    """Read files and return their entries (OSError: a file cannot be read)."""
    files = list(files)
    # Threads help: hashlib releases the interpreter lock, and a remote read mostly waits.
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = pool.map(lambda name: _hash_file(folder / name), files)
        return dict(zip(files, entries, strict=True))


def serialize_manifest(files: FileEntries, checkpoint: str = "") -> str:
    """Return the canonical text of a manifest.

    Args:
      files: Entries of all files.
      checkpoint: Name of the checkpoint's folder, which is its step. A renamed folder no longer
        matches its manifest.
    """
    entries = {name: files[name]._asdict() for name in sorted(files)}
    return json.dumps({"checkpoint": checkpoint, "files": entries}, indent=1) + "\n"


def parse_manifest(text: str) -> dict[str, FileEntry]:
    """Return the entries of a manifest (ValueError: the text is not a canonical manifest)."""
    return _parse(text)[0]


def _parse(text: str) -> tuple[dict[str, FileEntry], str]:
    """Return the entries, and the name of the checkpoint's folder."""
    try:
        record = json.loads(text)
        entries, checkpoint = record["files"], record["checkpoint"]
        files = {name: FileEntry(each["bytes"], each["sha256"]) for name, each in entries.items()}
        valid = all(map(_is_valid_entry, files, files.values()))
        # The text has one canonical form. Comparing it whole also catches a damaged character
        # that JSON would accept, such as a duplicated key or changed white space.
        valid = valid and serialize_manifest(files, checkpoint) == text
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError("is not a manifest") from error
    if not valid:
        raise ValueError("is not a manifest")
    return files, checkpoint


def write_manifest(folder: epath.Path, files: FileEntries) -> None:
    """Commit a checkpoint: write its manifest atomically."""
    # The commit point. The name appears by one rename, after the content was flushed to disk. The
    # arrays are not flushed, since fsync of gigabytes would stall the run's other writes. What of
    # them a power failure takes after the commit is noticed as damage by its digest, and the
    # checkpoint before it (`keep_last` is 2 by default) is restored.
    path = folder / MANIFEST_NAME
    # `replace_atomically` takes epath's paths for remote ones, which need no rename.
    remote = "://" in os.fspath(path)
    text = serialize_manifest(files, folder.name)
    replace_atomically(path if remote else pathlib.Path(path), text.encode())


def find_manifest_problem(folder: epath.Path, verify: VerifyMode) -> str | None:
    """Describe how a checkpoint differs from its manifest; None if it matches."""
    try:
        files, checkpoint = _parse((folder / MANIFEST_NAME).read_bytes().decode())
    except FileNotFoundError:
        return "has no manifest"
    except (OSError, ValueError):
        return f"{MANIFEST_NAME} is damaged"
    # A renamed folder has intact files. Restored under its new step, it would train other batches.
    if checkpoint != folder.name:
        return f"is the checkpoint of step {checkpoint}, under another name"
    # Sizes come first: they need no reading, and find most truncated files.
    for name, file in files.items():
        if problem := _find_size_problem(folder / name, file):
            return f"{name} {problem}"
    # Extra files are allowed: they change nothing that is restored.
    small = sum(file.bytes for file in files.values()) <= AUTO_VERIFY_BYTES
    if verify == "full" or (verify == "auto" and small):
        return _find_digest_problem(folder, files)
    return None


def _find_size_problem(path: epath.Path, file: FileEntry) -> str | None:
    try:
        actual_size = path.stat().length
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        return f"cannot be read ({error})"
    return (
        None
        if actual_size == file.bytes
        else f"has {actual_size:,} bytes instead of {file.bytes:,}"
    )


def _find_digest_problem(folder: epath.Path, files: FileEntries) -> str | None:
    try:
        digests = hash_files(folder, files)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    wrong = [name for name, file in files.items() if digests[name] != file]
    return f"{wrong[0]} differs from what was saved" if wrong else None


def _hash_file(path: epath.Path) -> FileEntry:
    # The size is counted, not asked for: the manifest must describe the bytes that were hashed.
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(size, digest.hexdigest())


def _is_valid_entry(name: str, file: FileEntry) -> bool:
    return type(file.bytes) is int and bool(_DIGEST.fullmatch(file.sha256))
