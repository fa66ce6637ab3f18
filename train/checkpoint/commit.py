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
from train.checkpoint.storage import EXTRA, LEAVES, STATE, check_complete
from train.errors import UserError
from train.parallel.distributed import meet

TIMEOUT_SECONDS = 1200
"""How long hosts wait for each other: as long as Orbax does."""


_seals = itertools.count()  # the same on every host, for all take part in every save


def seal(folder: epath.Path, arrays: Mapping[str, tree_paths.Leaf]) -> None:
    """Make a checkpoint count, once it is complete; every process calls this, on its own thread.

    Args:
      folder: The checkpoint's.
      arrays: What was saved, by name.

    Raises:
      OSError: On each of them, if one could not do its part or found something missing.
    """
    number, host, hosts = next(_seals), jax.process_index(), jax.process_count()
    if hosts == 1:
        check_complete(folder / STATE, arrays)
        manifest.write(folder, manifest.measure(folder, manifest.names(folder)))
        return
    with _then_meet(f"seal-{number}-measured"):
        check_complete(folder / STATE, arrays, host=host, hosts=hosts)
        mine = manifest.names(folder)[host::hosts]
        _part(folder, host).write_text(manifest.to_text(manifest.measure(folder, mine)))
    with _then_meet(f"seal-{number}-written"):
        if host == 0:
            manifest.write(folder, _together(folder, hosts))
    if not (folder / manifest.NAME).exists():
        raise OSError("another host could not write its part")


def _together(folder: epath.Path, hosts: int) -> dict[str, manifest.File]:
    """Merge the parts of all hosts; measure files that no host had seen."""
    files: dict[str, manifest.File] = {}
    for host in range(hosts):
        files |= manifest.from_text(_part(folder, host).read_text())
    files |= manifest.measure(folder, set(manifest.names(folder)) - files.keys())
    for host in range(hosts):
        _part(folder, host).unlink()
    return files


def _part(folder: epath.Path, host: int) -> epath.Path:
    return folder / f"{manifest.NAME}.{host}"


@contextlib.contextmanager
def _then_meet(place: str) -> Iterator[None]:
    """Hosts meet whether they did what was to be done or not: none is left waiting."""
    try:
        yield
    finally:
        meet(place, TIMEOUT_SECONDS)


_PARTS = 8  # more than a save has


class Writer:
    """Writes into a folder; whoever calls it has waited for what was being written."""

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[None]] | None = None

    @property
    def step(self) -> int | None:
        """Step that is being saved; None if none is."""
        return self._saving[0] if self._saving else None

    def save(
        self, step: int, state: Any, extra: Mapping[str, Any], dropped: Collection[int]
    ) -> None:
        """Begins to save; the steps that are dropped go when it is done."""
        arrays = tree_paths.named(state)
        items = {
            STATE: args.PyTreeSave(tree_paths.nested(arrays)),
            LEAVES: args.JsonSave(
                {name: tree_paths.describe(each) for name, each in arrays.items()}
            ),
            EXTRA: args.JsonSave(json.loads(json.dumps(extra))),
        }
        with self._explained(step):
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                discovery.clear_unfinished(self.directory)
            self._orbax.save(self.directory / str(step), args=args.Composite(**items))
            # Shapes alone: the arrays may be donated to the next step at once.
            shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
            self._saving = step, self._thread.submit(self._finish, step, shapes, dropped)

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
        seal(self.directory / str(step), arrays)
        if jax.process_index() == 0:
            for old in dropped:
                discovery.remove(self.directory, old)

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._saving = None
            self._outlast_failures()
            if jax.process_index() == 0:
                with contextlib.suppress(OSError, UserError):
                    discovery.clear_unfinished(self.directory)
            raise errors.unwritable(self.directory / str(step), errors.reason(error)) from error

    def _outlast_failures(self) -> None:
        """Waits until nothing of a failed save is left: each of its parts raises once."""
        for _ in range(_PARTS):
            with contextlib.suppress(OSError, ValueError):
                self._orbax.wait_until_finished()
                return
