"""Commit a checkpoint: read its arrays back, hash its files, and write its manifest.

The manifest lists the files that exist, so it cannot notice that Orbax wrote too few. Orbax merges
the files of all processes into one index (TensorStore's OCDBT). If that step finds nothing to
merge, it reports success and the arrays cannot be found by name. `check_arrays_readable` therefore
reads the index before a checkpoint counts.

With several processes, each hashes its share of the files and writes a partial manifest. Process 0
merges the parts. Nothing here uses a device, so training continues meanwhile.
"""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from etils import epath

from train.checkpoint import manifest
from train.checkpoint.manifest import AUTO_VERIFY_BYTES, MANIFEST_NAME, STATE_ITEM
from train.checkpoint.tree_paths import Leaf
from train.parallel.distributed import barrier
from train.run_folder.writing import is_local

COMMIT_TIMEOUT_SECONDS = 1200
"""Seconds that processes wait for each other: the same as Orbax's own timeout."""

_READS_IN_FLIGHT = 64

# Every process takes part in every save, so this count is the same on all of them and makes the
# names of barriers unique.
_commit_numbers = itertools.count()


def commit_checkpoint(folder: epath.Path, arrays: Mapping[str, Leaf]) -> None:
    """Check that a checkpoint is complete, then write its manifest.

    Every process calls this, from its checkpoint thread.

    Args:
      folder: Folder of the checkpoint. Orbax has finished writing it.
      arrays: Shape and dtype of each saved array, by name.

    Raises:
      OSError: On every process, if any of them failed or found something missing.
    """
    number, process, count = next(_commit_numbers), jax.process_index(), jax.process_count()
    if count == 1:
        # Read before hashing: digests say that files did not change, not that they hold the arrays.
        check_arrays_readable(folder / STATE_ITEM, arrays)
        files = manifest.hash_files(folder, manifest.list_files(folder))
        # The manifest is what makes a folder count as a checkpoint, so it is the last file.
        manifest.write_manifest(folder, files)
        return
    with _barrier_after(f"commit-{number}-measured"):
        check_arrays_readable(
            folder / STATE_ITEM, arrays, process_index=process, process_count=count
        )
        # Files are sorted, and striped over the processes to balance their sizes.
        own_files = manifest.list_files(folder)[process::count]
        part = manifest.serialize_manifest(manifest.hash_files(folder, own_files))
        _part_path(folder, process).write_text(part)
    # Only now are all parts written. The barrier after this block holds the other processes back
    # until the manifest exists, which they check below.
    with _barrier_after(f"commit-{number}-written"):
        if process == 0:
            manifest.write_manifest(folder, _merge_parts(folder, count))
    # A process that failed raises its own error. The others learn of it here: the part that it
    # did not write made the merge fail.
    if not (folder / MANIFEST_NAME).exists():
        raise OSError("another host could not write its part")


def _merge_parts(folder: epath.Path, count: int) -> dict[str, manifest.FileEntry]:
    """Merge and delete the partial manifests, and hash files that no process listed."""
    files: dict[str, manifest.FileEntry] = {}
    for process in range(count):
        files |= manifest.parse_manifest(_part_path(folder, process).read_text())
    # On a network file system a process may not see files that another has just written.
    files |= manifest.hash_files(folder, set(manifest.list_files(folder)) - files.keys())
    for process in range(count):
        _part_path(folder, process).unlink()
    return files


def _part_path(folder: epath.Path, process: int) -> epath.Path:
    return folder / f"{MANIFEST_NAME}.{process}"


@contextlib.contextmanager
def _barrier_after(name: str) -> Iterator[None]:
    """Meet the other processes after the block, also if it failed: none may wait in vain."""
    try:
        yield
    finally:
        barrier(name, COMMIT_TIMEOUT_SECONDS)


def check_arrays_readable(
    folder: epath.Path,
    arrays: Mapping[str, Leaf],
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> None:
    """Check that the index holds every chunk of every array, and that the chunks can be read.

    Chunks are read but not decoded. Above `AUTO_VERIFY_BYTES` only the index is checked.

    Args:
      folder: Folder to which Orbax wrote the arrays.
      arrays: Shape and dtype of each saved array, by name.
      process_index: This process, which reads its share of the chunks.
      process_count: Number of processes that share the reading.

    Raises:
      OSError: An array or a chunk is missing.
    """
    import tensorstore

    # Orbax separates the components of a name with dots, and stores no empty arrays.
    stored = {name.replace("/", "."): leaf for name, leaf in arrays.items() if leaf.size}
    try:
        spec, context = _ocdbt_spec(folder), tensorstore.Context()
        store = tensorstore.KvStore.open(spec, context=context).result()
        keys = set(store.list().result())
    except Exception as error:
        if not is_local(folder):
            # Object stores may need settings that only Orbax knows. A store that cannot be
            # reached at all has failed in Orbax before.
            return
        raise OSError(f"the index of its arrays cannot be read: {error}") from error
    keys_by_array: dict[str, list[bytes]] = {}
    for key in keys:
        keys_by_array.setdefault(key.decode().rpartition("/")[0], []).append(key)
    # An array is `<name>/.zarray`, its header, and a key for each chunk.
    chunks: list[bytes] = []
    for name, leaf in stored.items():
        header = f"{name}/.zarray".encode()
        if header not in keys:
            raise OSError(f"array {name} is not in the index that Orbax wrote")
        chunk_keys = [key for key in keys_by_array[name] if key != header]
        if len(chunk_keys) < _count_chunks(json.loads(store.read(header).result().value), leaf):
            raise OSError(f"array {name} is not whole in the index that Orbax wrote")
        chunks += chunk_keys
    if sum(leaf.size * _item_bytes(leaf) for leaf in stored.values()) > AUTO_VERIFY_BYTES:
        return  # reading everything would take minutes
    # Sorted: `keys` is a set, whose order differs between processes, and shares must not overlap.
    own_chunks = sorted(chunks)[process_index::process_count]
    # In batches: a large model has more chunks than reads may be in flight.
    for begin in range(0, len(own_chunks), _READS_IN_FLIGHT):
        batch = own_chunks[begin : begin + _READS_IN_FLIGHT]
        for key, read in zip(batch, [store.read(each) for each in batch], strict=True):
            # TensorStore returns an empty value, not an error, for a missing data file.
            if not read.result().value:
                raise OSError(f"array {key.decode()} cannot be read back")


def _count_chunks(metadata: dict[str, Any], leaf: Leaf) -> int:
    """Return the number of chunks in an array's Zarr v2 grid."""
    # Random keys are stored as integers with one more axis, so only leading axes must agree.
    if tuple(metadata["shape"])[: leaf.ndim] != tuple(leaf.shape):
        raise OSError(f"an array of shape {leaf.shape} was written as {metadata['shape']}")
    pairs = zip(metadata["shape"], metadata["chunks"], strict=True)
    return math.prod(-(-size // chunk) for size, chunk in pairs)


def _item_bytes(leaf: Leaf) -> int:
    return getattr(leaf.dtype, "itemsize", 4)  # random keys have no itemsize


def _ocdbt_spec(folder: epath.Path) -> dict[str, Any]:
    """Return TensorStore's JSON spec of the key-value store in a folder."""
    path = f"{os.fspath(folder).rstrip('/')}/"
    base = {"driver": "file", "path": path} if is_local(folder) else path
    return {"driver": "ocdbt", "base": base}
