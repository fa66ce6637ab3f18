"""Save, list, verify and restore the checkpoints of a run."""

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import jax
from etils import epath

from train.checkpoint import discovery, manifest, reader, retention
from train.checkpoint.discovery import SearchResult
from train.checkpoint.reader import RestoredCheckpoint
from train.checkpoint.retention import RetentionPolicy
from train.checkpoint.writer import CheckpointWriter
from train.errors import UserError
from train.parallel.distributed import is_lost_peer_error


class CheckpointManager:
    """Checkpoints in a directory, one folder for each saved step.

    A save that is interrupted at any moment leaves no checkpoint: it is not listed, and the next
    save deletes its files. An older checkpoint is deleted only after a newer one is committed.
    With several processes, every process makes every call.
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
        """Prepare the directory's manager. Nothing is written before the first save.

        Args:
          directory: Local or remote directory; it need not exist.
          save_every: Steps between saves that are due; 0: none is due.
          keep_last: Number of newest checkpoints to keep, at least 1.
          keep_every: Keep checkpoints at multiples of this many steps too; 0: off.
          keep_last_due: Number of newest due checkpoints to keep too.
          keep_min_age: Keep a due checkpoint that is at least this many steps old too; 0: off.
          asynchronous: Write in the background while training continues.
          read_only: Refuse to change anything, as another process may train here.
          verify: Comparison with the manifest before a restore: `sizes`, digests too (`full`), or
            digests of checkpoints up to 4 GiB (`auto`).
        """
        self.directory = discovery.absolute_path(directory)
        self._retention = RetentionPolicy(
            keep_last, save_every, keep_last_due, keep_min_age, keep_every
        )
        self._asynchronous, self._read_only, self._verify = asynchronous, read_only, verify
        # Created by the first save: a manager that only reads starts no threads.
        self._writer: CheckpointWriter | None = None
        # Steps whose files were compared with their manifest, so that `restore` after
        # `find_newest_valid` does not hash gigabytes a second time.
        self._verified: set[int] = set()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints but a save in progress, oldest first."""
        # The manifest of a save in progress appears at some moment of its own, and on a network
        # file system at another one for each process. So that all processes list the same steps,
        # it counts once the main thread of each has waited for it.
        saving = self._writer.saving_step if self._writer else None
        return [s for s in discovery.list_steps(self.directory) if s != saving]

    @property
    def saved_step(self) -> int | None:
        """Step of the last save of this process that is complete; None if there is none yet."""
        return self._writer.saved_step if self._writer else None

    def latest_step(self) -> int | None:
        """Return the newest of `steps` without verifying it; None if there is none."""
        return max(self.steps(), default=None)

    def find_newest_valid(self, below: int | None = None) -> SearchResult:
        """Return the newest valid checkpoint. All files are verified again.

        Args:
          below: Consider only steps smaller than this.
        """
        steps = [step for step in self.steps() if below is None or step < below]
        # A disk may have damaged since then what was verified before.
        self._verified.difference_update(steps)
        result = discovery.find_newest_valid(steps, self.find_problem)
        if result.step is not None:
            # On every process, although only process 0 has read the files.
            self._verified.add(result.step)
        return result

    def valid_steps(self, steps: Iterable[int]) -> list[int]:
        """Return those of the steps that have a valid checkpoint, as process 0 sees them."""
        saved = self.steps() if jax.process_index() == 0 else []
        valid = [step for step in steps if step in saved and self.find_problem(step) is None]
        valid = discovery.broadcast_integers(valid)
        self._verified.update(valid)
        return valid

    def find_problem(self, step: int) -> str | None:
        """Describe how a checkpoint differs from what was saved; None if it does not.

        A checkpoint that was verified before is not read again, except by `find_newest_valid`.
        """
        if step in self._verified:
            return None
        problem = manifest.find_manifest_problem(self.directory / str(step), self._verify)
        if problem is None:
            self._verified.add(step)
        return problem

    def set_aside(self, step: int, name: str) -> None:
        """Rename a checkpoint to `<name>-<step>`, so that it is not listed any more."""
        self._check_writable()
        self._verified.discard(step)
        # Locally a rename is atomic. In an object store files are copied and deleted one by one: a
        # kill in between leaves a folder that differs from its manifest, or has none, and the next
        # resume sets that aside in turn.
        if jax.process_index() == 0:
            retention.set_aside_checkpoint(self.directory, step, name)
        discovery.broadcast_integers([])  # a barrier: no process continues before the rename

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step` steps."""
        return self._retention.save_every > 0 and step % self._retention.save_every == 0

    def keep_best(self, step: int) -> None:
        """Keep the checkpoint of this step from the next save on, in place of an earlier best."""
        self._retention.best_step = step

    def pin(self, step: int) -> None:
        """Never delete the checkpoint of this step."""
        self._retention.pinned_steps.add(step)

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Save a state in the background, after waiting for the previous save.

        Args:
          step: Step of the state; it must have no checkpoint yet.
          state: Pytree of JAX arrays, random keys included. Its buffers may be donated as soon as
            this returns.
          metadata: JSON values to store with the state.

        Raises:
          UserError: This save or the previous one failed, of a full disk for example, or the step
            has a checkpoint already. Older checkpoints are intact, and a save can be retried.
        """
        self._check_writable()
        # One save at a time. This is also where the failure of the last one is raised: it happened
        # on a background thread.
        self.wait()
        steps = self.steps()
        if step in steps:
            # Orbax would delete the folder first, and with it a checkpoint of another process.
            raise UserError(
                f"checkpoint {self.directory / str(step)}: exists already; let only one process "
                "at a time train in a run's folder"
            )
        # Decided now, with the new step counted as saved; deleted once it is committed.
        to_delete = {*steps, step} - self._retention.steps_to_keep({*steps, step})
        self._verified.discard(step)  # an earlier save of this step may have been set aside
        self._writer = self._writer or CheckpointWriter(self.directory)
        self._writer.save(step, state, metadata, to_delete)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress is committed (UserError: it failed)."""
        if self._writer is not None:
            self._writer.wait()

    def restore(self, step: int, abstract_state: Any) -> RestoredCheckpoint:
        """Restore the whole state of a step, bit for bit.

        Args:
          step: One of `steps`.
          abstract_state: Tree that was saved, with a `jax.ShapeDtypeStruct` for each array. An
            array goes to the sharding of its struct, whatever mesh it was saved from, or to the
            first local device.

        Raises:
          UserError: The step has no checkpoint, or a damaged one, or one with other parameters,
            shapes or dtypes.
        """
        return reader.restore_checkpoint(
            self._verified_path(step), abstract_state, require_all=True
        )

    def restore_subtree(self, step: int, name: str, abstract_tree: Any) -> Any:
        """Restore one field of the state and leave the rest on disk.

        Args:
          step: One of `steps`.
          name: Name of the field, such as `params`.
          abstract_tree: Tree of the field, as in `restore`.

        Raises:
          UserError: As in `restore`.
        """
        path = self._verified_path(step)
        restored = reader.restore_checkpoint(path, {name: abstract_tree}, require_all=False)
        return restored.state[name]

    def read_metadata(self, step: int) -> dict[str, Any]:
        """Return the metadata saved with a step (UserError: as in `restore`)."""
        return reader.read_metadata(self._verified_path(step))

    def close(self) -> None:
        """Wait for the save in progress and stop all threads."""
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
        # If another process has gone, a save in progress waits for it at a barrier forever.
        if error is None or not is_lost_peer_error(error):
            self.close()

    def _check_writable(self) -> None:
        if self._read_only:
            raise ValueError(
                f"checkpoints {self.directory}: were opened read-only; open them without read_only"
            )

    def _verified_path(self, step: int) -> epath.Path:
        """Return the folder of a checkpoint (UserError: it does not exist, or is damaged)."""
        path = self.directory / str(step)
        # Listed anew: a run that trains on may have deleted it since the caller chose it.
        steps = self.steps()
        if step not in steps:
            known = f"steps {', '.join(map(str, steps))}" if steps else "no step"
            raise UserError(f"checkpoint {path}: does not exist; the folder has {known}")
        if problem := self.find_problem(step):
            raise UserError(
                f"checkpoint {path}: is damaged ({problem}); ask for another step, or restore "
                "what was saved"
            )
        return path
