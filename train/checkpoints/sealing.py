"""Writing the manifest of a checkpoint whose files are all there.

Each host reads the files that fall to it, and writes what they are beside them; when all have, one
host puts it together. Nothing here touches a device: training goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping

import jax
from etils import epath

from train import leaves
from train.checkpoints import manifest
from train.checkpoints.completeness import check_complete
from train.checkpoints.restoring import STATE
from train.hosts import meet

TIMEOUT_SECONDS = 1200
"""How long hosts wait for each other: as long as Orbax does."""

_seals = itertools.count()  # the same on every host, for all take part in every save


def seal(folder: epath.Path, arrays: Mapping[str, leaves.Leaf]) -> None:
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
