"""Saving, listing and restoring the checkpoints in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import jax
from etils import epath

from train.checkpoint import discovery, errors, manifest, storage
from train.checkpoint.commit import CheckpointWriter
from train.checkpoint.discovery import RetentionPolicy, SearchResult
from train.checkpoint.log_filters import install_log_filters
from train.checkpoint.storage import RestoredCheckpoint
from train.errors import UserError
from train.parallel.distributed import is_lost_peer_error


class CheckpointManager:
    """The checkpoints in a folder, one for each saved step.

    A save that was cut off at any moment is no checkpoint: it is not listed, and the next save
    clears it away. An older checkpoint goes only once a newer one is whole. Every process of a
    run takes part in each call.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every: int = 0,
        keep_last: int = 1,
        keep_every: int = 0,
        keep_last_due: int = 1,
        keep_min_age: int = 0,
        asynchronous: bool = True,
        read_only: bool = False,
        verify: manifest.VerifyMode = "auto",
    ):
        """Opens the folder, which need not be there yet; nothing is written before the first save.

        Args:
          directory: Local or remote.
          every: Steps between the saves that are `is_due`; 0: none is.
          keep: How many of the newest are kept, at least 1.
          keep_every: Those at multiples of this many steps are kept too; 0: none.
          average: So many of the newest that were `is_due` are kept too.
          apart: Of those that were `is_due` one is kept that is so many steps old; 0: none.
          asynchronous: Write while training goes on.
          read_only: Refuse to change anything there: another process may be training.
          verify: What is compared with the manifest before a restore: sizes alone; digests too
            (`full`); digests of a checkpoint that is not large (`auto`).
        """
        install_log_filters()
        self.directory = discovery.absolute_path(directory)
        self._retention = RetentionPolicy(
            keep_last, save_every, keep_last_due, keep_min_age, keep_every
        )
        self._asynchronous, self._read_only, self._verify = asynchronous, read_only, verify
        self._writer: CheckpointWriter | None = None
        self._verified: set[int] = set()

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, oldest first, one being saved left out."""
        saving = self._writer.saving_step if self._writer else None
        return [s for s in discovery.list_steps(self.directory, committed=True) if s != saving]

    def incomplete_steps(self) -> list[int]:
        """The steps without a manifest: their save was cut off, or it is lost."""
        return discovery.broadcast_integers(discovery.list_steps(self.directory, committed=False))

    def latest_step(self) -> int | None:
        """The newest of `steps`, whole or not."""
        return max(self.steps(), default=None)

    def find_newest_valid(self, below: int | None = None) -> SearchResult:
        """The newest checkpoint that is as it was saved, found by looking at all files again.

        Args:
          below: Only those of steps before this.
        """
        steps = [step for step in self.steps() if below is None or step < below]
        self._verified.difference_update(steps)
        found = discovery.find_newest_valid(steps, self.find_problem)
        if found.step is not None:
            self._verified.add(found.step)
        return found

    def valid_steps(self, steps: Iterable[int]) -> list[int]:
        """Those of the steps whose checkpoints are there, and as they were saved."""
        first = jax.process_index() == 0
        there = self.steps() if first else []
        found = discovery.broadcast_integers(
            [s for s in steps if s in there and self.find_problem(s) is None]
        )
        self._verified.update(found)
        return found

    def find_problem(self, step: int) -> str | None:
        """What of a checkpoint is not as it was saved, in a few words; None if nothing is.

        What was found whole is not looked at again, but by `find_newest_valid`.
        """
        if step in self._verified:
            return None
        why = manifest.find_manifest_problem(self.directory / str(step), self._verify)
        if why is None:
            self._verified.add(step)
        return why

    def set_aside(self, step: int, name: str) -> None:
        """Renames a checkpoint to ``<name>-<step>``: it counts no more, and nothing is lost."""
        self._check_writable()
        self._verified.discard(step)
        if jax.process_index() == 0:
            discovery.set_aside_checkpoint(self.directory, step, name)
        discovery.broadcast_integers([])  # all go on when it is done

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is wanted after ``step`` steps."""
        return self._retention.save_every > 0 and step % self._retention.save_every == 0

    def keep_best(self, step: int) -> None:
        """From the next save on, the checkpoint of this step is kept, and of none before."""
        self._retention.best_step = step

    def pin(self, step: int) -> None:
        """The checkpoint of this step is kept, whatever comes."""
        self._retention.pinned_steps.add(step)

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Saves a state as it is now, in the background; what is being saved is waited for.

        Args:
          step: The step that the state is at; there must be no checkpoint of it.
          state: A tree of jax arrays (random keys too). It may be donated at once.
          extra: What else to keep; anything that JSON can hold.

        Raises:
          UserError: This save, or the one before, failed (a full disk, say), or there is a
            checkpoint of this step already. The older checkpoints are whole; a save can be tried
            again.
        """
        self._check_writable()
        self.wait()
        steps = self.steps()
        if step in steps:
            raise UserError(
                f"checkpoint {self.directory / str(step)}: is there already; "
                "let one process at a time train in a run's folder"
            )
        dropped = {*steps, step} - self._retention.steps_to_keep({*steps, step})
        self._verified.discard(step)
        self._writer = self._writer or CheckpointWriter(self.directory)
        self._writer.save(step, state, metadata, dropped)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Waits until what is being saved is on disk (UserError: it could not be written)."""
        if self._writer is not None:
            self._writer.wait()

    def restore(self, step: int, abstract_state: Any) -> RestoredCheckpoint:
        """Restores the whole state of a step, bit for bit.

        Args:
          step: One of `steps`.
          like: The tree that was saved, with a `jax.ShapeDtypeStruct` for each array. Its sharding
            says where the array goes, whatever the mesh it came from; the first device if it has
            none.

        Raises:
          UserError: There is no such step, it is not as it was saved, or it is of a model with
            other parameters, shapes or dtypes.
        """
        return storage.restore_checkpoint(self._found(step), abstract_state, require_all=True)

    def restore_subtree(self, step: int, name: str, abstract_tree: Any) -> Any:
        """Restores a part of the state and leaves the rest on the disk.

        Args:
          step: One of `steps`.
          part: The name of the part: ``params``, say.
          like: The part, as in `restore`.

        Raises:
          UserError: As `restore` does.
        """
        return storage.restore_checkpoint(
            self._found(step), {name: abstract_tree}, require_all=False
        ).state[name]

    def read_metadata(self, step: int) -> dict[str, Any]:
        """What else was saved with the state of a step (UserError: as `restore`)."""
        return storage.read_metadata(self._found(step))

    def close(self) -> None:
        """Waits for what is being saved, and lets go of all threads."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A save that is under way would wait for one that will not come.
        if error is None or not is_lost_peer_error(error):
            self.close()

    def _check_writable(self) -> None:
        if self._read_only:
            raise ValueError(f"checkpoints {self.directory}: were opened to be read alone")

    def _found(self, step: int) -> epath.Path:
        """The folder of a checkpoint (UserError: there is none, or it is damaged)."""
        there = self.directory / str(step)
        if step not in self.steps():
            raise UserError(f"checkpoint {there}: does not exist; {self._choice()}")
        if why := self.find_problem(step):
            raise errors.damaged_error(there, why)
        return there

    def _choice(self) -> str:
        if steps := self.steps():
            return f"there are those of steps {', '.join(map(str, steps))}"
        return "there are none in this folder"
