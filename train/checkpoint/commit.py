"""Writing the manifest of a checkpoint whose files are all there.

Each host reads the files that fall to it, and writes what they are beside them; when all have, one
host puts it together. Nothing here touches a device: training goes on meanwhile.

Writing checkpoints in the background, one after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args

from train.checkpoint import discovery, errors, manifest, tree_paths
from train.checkpoint.storage import LEAVES_ITEM, METADATA_ITEM, STATE_ITEM, check_arrays_readable
from train.errors import UserError
from train.parallel.distributed import barrier

COMMIT_TIMEOUT_SECONDS = 1200
"""How long hosts wait for each other: as long as Orbax does."""


_seals = itertools.count()  # the same on every host, for all take part in every save


def commit_checkpoint(folder: epath.Path, arrays: Mapping[str, tree_paths.Leaf]) -> None:
    """Make a checkpoint count, once it is complete; every process calls this, on its own thread.

    Args:
      folder: The checkpoint's.
      arrays: What was saved, by name.

    Raises:
      OSError: On each of them, if one could not do its part or found something missing.
    """
    number, host, hosts = next(_seals), jax.process_index(), jax.process_count()
    if hosts == 1:
        check_arrays_readable(folder / STATE_ITEM, arrays)
        manifest.write_manifest(folder, manifest.hash_files(folder, manifest.list_files(folder)))
        return
    with _then_meet(f"seal-{number}-measured"):
        check_arrays_readable(folder / STATE_ITEM, arrays, process_index=host, process_count=hosts)
        mine = manifest.list_files(folder)[host::hosts]
        _part(folder, host).write_text(
            manifest.serialize_manifest(manifest.hash_files(folder, mine))
        )
    with _then_meet(f"seal-{number}-written"):
        if host == 0:
            manifest.write_manifest(folder, _together(folder, hosts))
    if not (folder / manifest.MANIFEST_NAME).exists():
        raise OSError("another host could not write its part")


def _together(folder: epath.Path, hosts: int) -> dict[str, manifest.FileEntry]:
    """Merge the parts of all hosts; measure files that no host had seen."""
    files: dict[str, manifest.FileEntry] = {}
    for host in range(hosts):
        files |= manifest.parse_manifest(_part(folder, host).read_text())
    files |= manifest.hash_files(folder, set(manifest.list_files(folder)) - files.keys())
    for host in range(hosts):
        _part(folder, host).unlink()
    return files


def _part(folder: epath.Path, host: int) -> epath.Path:
    return folder / f"{manifest.MANIFEST_NAME}.{host}"


@contextlib.contextmanager
def _then_meet(place: str) -> Iterator[None]:
    """Hosts meet whether they did what was to be done or not: none is left waiting."""
    try:
        yield
    finally:
        barrier(place, COMMIT_TIMEOUT_SECONDS)


_PARTS = 8  # more than a save has


class CheckpointWriter:
    """Writes into a folder; whoever calls it has waited for what was being written."""

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[None]] | None = None

    @property
    def saving_step(self) -> int | None:
        """Step that is being saved; None if none is."""
        return self._saving[0] if self._saving else None

    def save(
        self, step: int, state: Any, metadata: Mapping[str, Any], steps_to_delete: Collection[int]
    ) -> None:
        """Begins to save; the steps that are dropped go when it is done."""
        arrays = tree_paths.named_leaves(state)
        items = {
            STATE_ITEM: args.PyTreeSave(tree_paths.nest_leaves(arrays)),
            LEAVES_ITEM: args.JsonSave(
                {name: tree_paths.describe_leaf(each) for name, each in arrays.items()}
            ),
            METADATA_ITEM: args.JsonSave(json.loads(json.dumps(metadata))),
        }
        with self._explained(step):
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                discovery.delete_unfinished(self.directory)
            self._orbax.save(self.directory / str(step), args=args.Composite(**items))
            # Shapes alone: the arrays may be donated to the next step at once.
            shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
            self._saving = step, self._thread.submit(self._finish, step, shapes, steps_to_delete)

    def wait(self) -> None:
        """Until what is being saved counts (UserError: it could not be written)."""
        if self._saving is not None:
            step, done = self._saving
            with self._explained(step):
                done.result()
            self._saving = None

    def close(self) -> None:
        """Lets go of all threads."""
        self._thread.shutdown()
        with contextlib.suppress(OSError, ValueError):  # of a save that failed: that was told
            self._orbax.close()

    def _finish(
        self, step: int, arrays: Mapping[str, tree_paths.Leaf], dropped: Collection[int]
    ) -> None:
        """In the background: Orbax commits, the manifest is written, older checkpoints go."""
        self._orbax.wait_until_finished()
        commit_checkpoint(self.directory / str(step), arrays)
        if jax.process_index() == 0:
            for old in dropped:
                discovery.delete_checkpoint(self.directory, old)

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._saving = None
            self._outlast_failures()
            if jax.process_index() == 0:
                with contextlib.suppress(OSError, UserError):
                    discovery.delete_unfinished(self.directory)
            raise errors.unwritable_error(
                self.directory / str(step), errors.short_reason(error)
            ) from error

    def _outlast_failures(self) -> None:
        """Waits until nothing of a failed save is left: each of its parts raises once."""
        for _ in range(_PARTS):
            with contextlib.suppress(OSError, ValueError):
                self._orbax.wait_until_finished()
                return
