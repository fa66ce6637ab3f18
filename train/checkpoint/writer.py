"""Write checkpoints in the background, through Orbax, and commit them.

A save has four stages, and a process may be killed in any of them. What it leaves:

| killed while | leaves | cleared away by |
| --- | --- | --- |
| the arrays are copied to host memory | nothing | |
| Orbax writes the items | a folder with `ORBAX_TMP_MARKER` in its name | the next save |
| files are read back and hashed (`commit`) | a folder without a manifest | the next save |
| older checkpoints are deleted | more checkpoints than are due | the next save |

None of these is listed as a checkpoint, and the one before is deleted only in the last stage. The
mark `<step>.unfinished` lies beside the folder from before the first stage until the manifest is
written. It tells a save that was killed from a checkpoint that has lost its manifest.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args

from train.checkpoint import retention, tree_paths
from train.checkpoint.commit import commit_checkpoint
from train.checkpoint.discovery import ORBAX_TMP_MARKER
from train.checkpoint.manifest import LEAVES_ITEM, METADATA_ITEM, STATE_ITEM
from train.checkpoint.reader import error_cause
from train.checkpoint.tree_paths import Leaf
from train.errors import UserError

_MAX_ITEMS = 8
"""Upper bound of the items of a save, each of which can raise once."""


class CheckpointWriter:
    """Write one checkpoint at a time, on a background thread.

    Callers call `wait` before the next `save`.
    """

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        # One thread, because Orbax's own background thread cannot be given work to do after it has
        # finished: the commit has to wait for it somewhere else than in the training loop.
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # Set from `save` until `wait` has seen the result, so that no error is lost.
        self._saving: tuple[int, Future[None]] | None = None
        self.saved_step: int | None = None
        """Step of the last save that is complete; None if there is none yet."""

    @property
    def saving_step(self) -> int | None:
        """Step of the save in progress; None if there is none."""
        return self._saving[0] if self._saving else None

    def save(
        self, step: int, state: Any, metadata: Mapping[str, Any], steps_to_delete: Collection[int]
    ) -> None:
        """Start a save. When it is committed, the checkpoints of `steps_to_delete` are deleted.

        Raises:
          UserError: The directory cannot be written.
        """
        arrays = tree_paths.named_leaves(state)
        descriptions = {name: tree_paths.describe_leaf(leaf) for name, leaf in arrays.items()}
        items = {
            STATE_ITEM: args.PyTreeSave(tree_paths.nest_leaves(arrays)),
            # Shapes and dtypes, so that a restore into another model can name what differs.
            LEAVES_ITEM: args.JsonSave(descriptions),
            # Through JSON and back here: what JSON cannot hold is an error in the caller's own line
            # and not of a thread, and later changes of the dict are not saved.
            METADATA_ITEM: args.JsonSave(json.loads(json.dumps(metadata))),
        }
        with self._explain_errors(step):
            # Before the save and not after: killed saves may have left a full disk.
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                retention.delete_unfinished(self.directory)
                retention.unfinished_mark(self.directory, step).write_bytes(b"")
            # Orbax returns once the arrays are copied to host memory.
            self._orbax.save(self.directory / str(step), args=args.Composite(**items))
            # The thread gets shapes only: the arrays may be donated to the next step at once.
            shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items()}
            self._saving = step, self._thread.submit(self._finish, step, shapes, steps_to_delete)

    def wait(self) -> None:
        """Wait until the save in progress is committed (UserError: it failed)."""
        if self._saving is not None:
            step, done = self._saving
            with self._explain_errors(step):
                done.result()
            self._saving = None

    def close(self) -> None:
        """Stop all threads."""
        # The commit thread first, since it waits for Orbax's threads.
        self._thread.shutdown()
        with contextlib.suppress(OSError, ValueError):  # `wait` has already raised this error
            self._orbax.close()

    def _finish(
        self, step: int, shapes: Mapping[str, Leaf], steps_to_delete: Collection[int]
    ) -> None:
        """Commit the checkpoint, then delete older ones. Runs on the background thread."""
        self._orbax.wait_until_finished()
        # Here and not in the training loop, which meanwhile runs the next steps.
        commit_checkpoint(self.directory / str(step), shapes)
        self.saved_step = step
        # Deleting comes last: at every moment the newest committed checkpoint exists.
        if jax.process_index() == 0:
            # A mark beside a manifest means nothing, and the next save deletes it.
            with contextlib.suppress(OSError):
                retention.unfinished_mark(self.directory, step).unlink()
            for old in steps_to_delete:
                retention.delete_checkpoint(self.directory, old)

    @contextlib.contextmanager
    def _explain_errors(self, step: int) -> Iterator[None]:
        """Clean up after a failed save and raise a UserError in place of Orbax's error."""
        try:
            yield
        except (OSError, ValueError) as error:
            # A failed save is over: the next one may find room on the disk.
            self._saving = None
            self._drain_errors()
            if jax.process_index() == 0:
                # What is left of a failed save may be what fills the disk.
                with contextlib.suppress(OSError, UserError):
                    retention.delete_unfinished(self.directory)
            raise UserError(
                f"checkpoint {self.directory / str(step)}: could not be written "
                f"({error_cause(error)}); make room there or check its permissions; "
                "the checkpoints before it are whole"
            ) from error

    def _drain_errors(self) -> None:
        """Wait until no item of a failed save is left.

        Orbax raises the error of one item at a time. An error that stays behind would be raised
        by the next save, which may be fine.
        """
        # Until one wait raises nothing. Bounded: an error that stays must not hang the run.
        for _ in range(_MAX_ITEMS):
            with contextlib.suppress(OSError, ValueError):
                self._orbax.wait_until_finished()
                return


_ORBAX_PATH = f"{os.sep}orbax{os.sep}"


def install_log_filters() -> None:
    """Keep Orbax's and TensorStore's own reports of a failed save off the screen, in this process.

    The trainer raises one line for a failed save. Without filters, Orbax logs every stage and each
    failure with its traceback. Of the items of a save one fails first; the failures of the others
    reach asyncio's logger or `sys.unraisablehook`, because nobody awaits them any more.

    There is no setting in Orbax for it, so the filters are process-wide. They drop only records
    that come from Orbax or name its temporary folders. `train.fit` and `train.load` install them;
    constructing a `CheckpointManager` does not. A second call changes nothing.
    """
    logging.getLogger("absl").addFilter(_is_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_about_a_save)
    if not isinstance(sys.unraisablehook, _UnraisableFilter):
        sys.unraisablehook = _UnraisableFilter(sys.unraisablehook)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    # The logger of absl is shared: records of other libraries pass.
    return _ORBAX_PATH not in record.pathname


def _is_not_about_a_save(record: logging.LogRecord) -> bool:
    """Return False for the error of a save that asyncio reports as never retrieved."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return True
    frames = traceback.walk_tb(error.__traceback__)
    through_orbax = any(_ORBAX_PATH in frame.f_code.co_filename for frame, _ in frames)
    # Errors that TensorStore raises from C++ have no traceback, but name the folder.
    return not (through_orbax or ORBAX_TMP_MARKER in str(error))


class _UnraisableFilter:
    """Unraisable hook that drops "event loop is closed" errors of TensorStore's C++ threads.

    When a save fails, its event loop is closed while TensorStore still writes. The C++ thread
    then calls `call_soon_threadsafe` on the closed loop, with no Python frame above it.
    """

    def __init__(self, previous: Callable[["sys.UnraisableHookArgs"], object]):
        self._previous = previous

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        trace = unraisable.exc_traceback
        # Called from C++, the method of the loop is the outermost frame. Called from Python, a
        # caller would be above it.
        outermost = trace.tb_frame.f_code if trace else None
        from_cpp = outermost is asyncio.BaseEventLoop.call_soon_threadsafe.__code__
        if not (from_cpp and isinstance(unraisable.exc_value, RuntimeError)):
            self._previous(unraisable)
