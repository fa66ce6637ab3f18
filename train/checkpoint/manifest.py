"""Manifest of a checkpoint: the size and SHA-256 digest of each file, as one more Orbax item.

Orbax writes a checkpoint under a temporary name and renames it once all items are complete (in
Google's object store, it marks the folder instead). The manifest is completed last before that, so
that every checkpoint that counts has one, and a save that is killed leaves no checkpoint. A restore
compares the files with it, because Orbax and TensorStore do not detect a flipped bit.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from fsspec.core import url_to_fs

STATE_ITEM, LEAVES_ITEM, METADATA_ITEM = "state", "leaves", "extra"
"""Subfolders of a checkpoint: the arrays, their dtypes and shapes, and JSON metadata."""

MANIFEST_ITEM = "manifest"

JSON_FILE = "metadata"
"""File of an Orbax item that holds JSON."""

VerifyMode = Literal["auto", "sizes", "full"]
"""Comparison before a restore: `sizes` of files, digests too (`full`), or digests up to
`AUTO_VERIFY_BYTES` (`auto`)."""

AUTO_VERIFY_BYTES = 4 * 2**30
"""Largest checkpoint whose digests `auto` verifies. Hashing it takes at most ten seconds a core."""

_THREADS = 4

_READS_IN_FLIGHT = 256


class ManifestHandler(ocp.JsonCheckpointHandler):
    """Orbax's handler of the manifest.

    It saves a record with the step (`checkpoint`) and the names of the arrays (`arrays`). Orbax
    finalizes the items in the order of its registry, on process 0. As the last item, the manifest
    then gets the digests of the files of the others.
    """

    def finalize(self, directory: epath.Path) -> None:
        """Check that the arrays are complete, and write the manifest (OSError: they are not)."""
        folder, path = directory.parent, directory / JSON_FILE
        record = json.loads(path.read_text())
        check_arrays_complete(folder / STATE_ITEM, record["arrays"])
        sizes = {
            name: size
            for name, size in _list_files(folder).items()
            if name.startswith((f"{STATE_ITEM}/", f"{LEAVES_ITEM}/", f"{METADATA_ITEM}/"))
        }
        digests = _hash_files(folder, sizes)
        files = {name: {"bytes": sizes[name], "sha256": digests[name]} for name in sorted(sizes)}
        path.write_text(_serialize({"checkpoint": record["checkpoint"], "files": files}))


def manifest_path(folder: epath.Path) -> epath.Path:
    """Return the path of a checkpoint's manifest."""
    return folder / MANIFEST_ITEM / JSON_FILE


def find_manifest_problem(folder: epath.Path, verify: VerifyMode) -> str | None:
    """Describe how a checkpoint differs from its manifest; None if it matches."""
    try:
        step, expected = _parse(manifest_path(folder).read_text())
        total = sum(size for size, _ in expected.values())
    except FileNotFoundError:
        return "has no manifest"
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError):
        return "its manifest is damaged"
    # A renamed folder has intact files. Restored under its new step, it would train other batches.
    if step != folder.name:
        return f"is the checkpoint of step {step}, under another name"
    # Sizes come first: they need no reading, and find most truncated files.
    sizes = _list_files(folder)
    for name, (size, _) in expected.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]:,} bytes instead of {size:,}"
    # Extra files are allowed: they change nothing that is restored.
    if verify == "sizes" or (verify == "auto" and total > AUTO_VERIFY_BYTES):
        return None
    try:
        digests = _hash_files(folder, expected)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    wrong = [name for name, (_, digest) in expected.items() if digests[name] != digest]
    return f"{wrong[0]} differs from what was saved" if wrong else None


def check_arrays_complete(folder: epath.Path, arrays: Iterable[str]) -> None:
    """Check that every chunk of every array is there (OSError: one is not).

    Each process writes files of its own, which Orbax then merges into one index. On a network file
    system process 0 may not see the files of another process yet; Orbax merges what it sees.
    """
    if "://" in os.fspath(folder):
        return  # an object store lists what was written
    base = {"driver": "file", "path": f"{os.fspath(folder)}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    # An array is `<name>/.zarray`, its header, and a key for each chunk.
    keys: dict[str, list[str]] = {}
    for key in store.list().result():
        keys.setdefault(key.decode().rpartition("/")[0], []).append(key.decode())
    chunks: list[str] = []
    for name in arrays:
        name = name.replace("/", ".")  # as Orbax does
        if name not in keys:
            raise OSError(f"array {name} is not in the index that Orbax wrote")
        header = json.loads(store.read(f"{name}/.zarray").result().value)
        grid = zip(header["shape"], header["chunks"], strict=True)
        if len(keys[name]) <= math.prod(-(-size // chunk) for size, chunk in grid):
            raise OSError(f"array {name} is not whole in the index that Orbax wrote")
        chunks += (key for key in keys[name] if not key.endswith("/.zarray"))
    if sum(_list_files(folder).values()) > AUTO_VERIFY_BYTES:
        return  # reading everything would take minutes
    # In batches: a large model has more chunks than reads may be in flight.
    for begin in range(0, len(chunks), _READS_IN_FLIGHT):
        batch = chunks[begin : begin + _READS_IN_FLIGHT]
        reads = [store.read(each) for each in batch]
        for chunk, read in zip(batch, reads, strict=True):
            # TensorStore returns an empty value, not an error, for a missing data file.
            if not read.result().value:
                raise OSError(f"array {chunk} cannot be read back")


def _serialize(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1) + "\n"


def _parse(text: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """Return the step of a manifest, and size and digest of each file."""
    record = json.loads(text)
    # The text has one canonical form. Comparing it whole catches a damaged character that JSON
    # would accept, such as a duplicated key.
    if _serialize(record) != text:
        raise ValueError("is not as it was written")
    files = record["files"]
    return record["checkpoint"], {n: (each["bytes"], each["sha256"]) for n, each in files.items()}


def _list_files(folder: epath.Path) -> dict[str, int]:
    """Return the size of each file, by its path relative to the folder."""
    files, root = url_to_fs(os.fspath(folder))
    files.invalidate_cache()  # the file systems of object stores remember listings
    found = files.find(root, detail=True)
    return {name[len(root) :].lstrip("/"): int(info["size"]) for name, info in found.items()}


def _hash_files(folder: epath.Path, names: Iterable[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    names = list(names)
    # Threads help: hashlib releases the interpreter lock, and a remote read mostly waits.
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))
