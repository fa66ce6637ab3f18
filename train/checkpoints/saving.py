"""Writing checkpoints in the background, one after the other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args

from train import leaves
from train.checkpoints import folder, words
from train.checkpoints.restoring import EXTRA, LEAVES, STATE
from train.checkpoints.sealing import seal
from train.errors import UserError

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
        arrays = leaves.named(state)
        items = {
            STATE: args.PyTreeSave(leaves.nested(arrays)),
            LEAVES: args.JsonSave({name: leaves.describe(each) for name, each in arrays.items()}),
            EXTRA: args.JsonSave(json.loads(json.dumps(extra))),
        }
        with self._explained(step):
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                folder.clear_unfinished(self.directory)
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
        self, step: int, arrays: Mapping[str, leaves.Leaf], dropped: Collection[int]
    ) -> None:
        """In the background: Orbax commits, the manifest is written, older checkpoints go."""
        self._orbax.wait_until_finished()
        seal(self.directory / str(step), arrays)
        if jax.process_index() == 0:
            for old in dropped:
                folder.remove(self.directory, old)

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            self._saving = None
            self._outlast_failures()
            if jax.process_index() == 0:
                with contextlib.suppress(OSError, UserError):
                    folder.clear_unfinished(self.directory)
            raise words.unwritable(self.directory / str(step), words.reason(error)) from error

    def _outlast_failures(self) -> None:
        """Waits until nothing of a failed save is left: each of its parts raises once."""
        for _ in range(_PARTS):
            with contextlib.suppress(OSError, ValueError):
                self._orbax.wait_until_finished()
                return
