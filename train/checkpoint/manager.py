"""Save, list, verify and restore the checkpoints of a run, through Orbax.

A checkpoint has four Orbax items: the arrays, their dtypes and shapes, JSON metadata, and the
manifest of all these files. A process may be killed at any stage of a save. What it leaves:

| killed while | leaves |
| --- | --- |
| the arrays are copied to host memory | nothing |
| Orbax writes the items, and the manifest | a temporary folder, which the next process deletes |
| older checkpoints are deleted | an older one that is damaged, or not deleted yet |

None of these counts as the newest checkpoint, and the one before is deleted only in the last stage.
"""

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args

from train.checkpoint import tree_paths
from train.checkpoint.manifest import (
    JSON_FILE,
    LEAVES_ITEM,
    MANIFEST_ITEM,
    METADATA_ITEM,
    STATE_ITEM,
    ManifestHandler,
    VerifyMode,
    find_manifest_problem,
)
from train.checkpoint.retention import RetentionPolicy
from train.checkpoint.tree_paths import Leaf
from train.errors import UserError, as_user_error, short_reason

NEW_START_REMEDY = "fit with another --workdir, or with --from-scratch to begin at step 0 here"
"""Remedy where all checkpoints of a run are lost."""

_SHOWN_CHECKPOINTS = 3


class RestoredCheckpoint(NamedTuple):
    """State and metadata, as given to `CheckpointManager.save`."""

    state: Any
    metadata: dict[str, Any]


class SkippedCheckpoint(NamedTuple):
    """Checkpoint that cannot be used."""

    step: int
    problem: str
    """Short description. Empty on processes other than 0."""


class SearchResult(NamedTuple):
    """Outcome of `CheckpointManager.find_newest_valid`."""

    step: int | None
    """Newest valid step; None if no checkpoint is valid."""
    skipped: list[SkippedCheckpoint]
    """Invalid checkpoints of later steps, newest first."""


class CheckpointManager:
    """Checkpoints in a directory, one folder for each saved step.

    A save that is interrupted at any moment leaves no checkpoint. An older checkpoint is deleted
    only after a newer one is complete. With several processes, every process makes every call.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        retention: RetentionPolicy | None = None,
        *,
        asynchronous: bool = True,
        verify: VerifyMode = "auto",
    ):
        """Prepare the directory's manager. Nothing is written before the first save.

        Args:
          directory: Local or remote directory; it need not exist.
          retention: Which checkpoints are kept. None: the newest one.
          asynchronous: Write in the background while training continues.
          verify: Comparison with the manifest before a restore.
        """
        # Orbax takes no relative path.
        name = os.fspath(directory)
        self.directory = epath.Path(name if "://" in name else pathlib.Path(name).absolute())
        self._retention = retention or RetentionPolicy()
        self._asynchronous, self._verify = asynchronous, verify
        # Created by the first save: a manager that only reads starts no threads.
        self._orbax: _OrbaxManager | None = None
        # From `save` until `wait` has seen the result.
        self._saving_step: int | None = None
        self._saved_step: int | None = None
        # Steps whose files were compared with their manifest, so that `restore` after
        # `find_newest_valid` does not hash gigabytes a second time.
        self._verified: set[int] = set()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints but a save in progress, oldest first.

        Raises:
          UserError: The directory cannot be read.
        """
        # A save becomes complete at some moment of its own, which each process may see at another
        # time. So that all processes list the same steps, it counts once the main thread of each
        # has waited for it.
        return [step for step in self._complete_steps() if step != self._saving_step]

    @property
    def saved_step(self) -> int | None:
        """Step of the last save of this process that is complete; None if there is none yet."""
        is_known = self._saving_step in (None, self._saved_step)
        is_over = self._orbax is not None and not self._orbax.is_saving_in_progress()
        # A save that has failed is over too, as `wait` will say. A folder that cannot be listed
        # at this moment is asked again.
        with contextlib.suppress(UserError):
            if not is_known and is_over and self._saving_step in self._complete_steps():
                self._saved_step = self._saving_step
        return self._saved_step

    def find_newest_valid(self) -> SearchResult:
        """Return the newest valid checkpoint. All files are verified again.

        All processes get the answer of process 0: two that see different files of a network file
        system would restore different states.
        """
        steps = self.steps()
        # A disk may have damaged since then what was verified before.
        self._verified.difference_update(steps)
        valid: list[int] = []
        skipped: list[SkippedCheckpoint] = []
        # Newest first, and no further than the first valid one: verifying reads every file.
        for step in reversed(steps if jax.process_index() == 0 else []):
            problem = self.find_problem(step)
            if problem is None:
                valid.append(step)
                break
            skipped.append(SkippedCheckpoint(step, problem))
        valid = broadcast_integers(valid)
        skipped_steps = broadcast_integers([each.step for each in skipped])
        if jax.process_index() != 0:
            skipped = [SkippedCheckpoint(step, "") for step in skipped_steps]
        self._verified.update(valid)
        return SearchResult(valid[0] if valid else None, skipped)

    def valid_steps(self, steps: Iterable[int]) -> list[int]:
        """Return those of the steps that have a valid checkpoint, as process 0 sees them."""
        saved = self.steps() if jax.process_index() == 0 else []
        valid = [step for step in steps if step in saved and self.find_problem(step) is None]
        valid = broadcast_integers(valid)
        self._verified.update(valid)
        return valid

    def find_problem(self, step: int) -> str | None:
        """Describe how a checkpoint differs from what was saved; None if it does not.

        A checkpoint that was verified before is not read again, except by `find_newest_valid`.
        """
        if step in self._verified:
            return None
        problem = find_manifest_problem(self.directory / str(step), self._verify)
        if problem is None:
            self._verified.add(step)
        return problem

    def set_aside(self, step: int, name: str) -> None:
        """Rename a checkpoint to `<name>-<step>`, so that the step can be saved again."""
        self._verified.discard(step)
        # Locally a rename is atomic. In an object store files are copied and deleted one by one: a
        # kill in between leaves a folder that differs from its manifest, or has none, and the next
        # resume sets that aside in turn.
        if jax.process_index() == 0:
            # Such a name is not a step number, so the folder is neither listed nor deleted.
            target, number = self.directory / f"{name}-{step}", 1
            while target.exists():
                number += 1
                target = self.directory / f"{name}-{step}-{number}"
            (self.directory / str(step)).rename(target)
        broadcast_integers([])  # a barrier: no process continues before the rename
        if self._orbax is not None:
            self._orbax.reload()

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

        The buffers of the state, JAX arrays with random keys among them, may be donated as soon as
        this returns. The metadata are JSON values.

        Raises:
          UserError: This save or the previous one failed, of a full disk for example, or the step
            has a checkpoint already. Older checkpoints are intact.
        """
        arrays = tree_paths.named_leaves(state)
        stored = sorted(name for name, leaf in arrays.items() if leaf.size)
        items = {
            STATE_ITEM: args.PyTreeSave(tree_paths.nest_leaves(arrays)),
            # Shapes and dtypes, so that a restore into another model can name what differs.
            LEAVES_ITEM: args.JsonSave(tree_paths.describe_leaves(arrays)),
            # Through JSON and back here: what JSON cannot hold is an error in the caller's own line
            # and not of a thread, and later changes of the dict are not saved.
            METADATA_ITEM: args.JsonSave(json.loads(json.dumps(metadata))),
            MANIFEST_ITEM: args.JsonSave({"checkpoint": str(step), "arrays": stored}),
        }
        # One save at a time. This is also where the failure of the last one is raised: it happened
        # on a background thread.
        self.wait()
        if step in self.steps():
            # Orbax would delete the folder first, and with it a checkpoint of another process.
            raise UserError(
                f"checkpoint {self.directory / str(step)}: exists already; let only one process "
                "at a time train in a run's folder"
            )
        self._verified.discard(step)  # an earlier save of this step may have been set aside
        with self._explain_write_errors(step):
            self._orbax = self._orbax or _make_orbax_manager(self.directory, self._retention)
            # Orbax returns once the arrays are copied to host memory.
            self._orbax.save(step, args=args.Composite(**items), force=True)
            self._saving_step = step
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress is complete (UserError: it failed)."""
        if self._orbax is not None and self._saving_step is not None:
            step, self._saving_step = self._saving_step, None
            with self._explain_write_errors(step):
                self._orbax.wait_until_finished()
            self._saved_step = step

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
        path = self._verified_path(step)
        with _explain_read_errors(path):
            metadata = _read_json(path, METADATA_ITEM)
            state = _restore_tree(path, abstract_state, require_all=True)
        return RestoredCheckpoint(state, metadata)

    def restore_subtree(self, step: int, name: str, abstract_tree: Any) -> Any:
        """Restore one field of the state, such as `params`, and leave the rest on disk."""
        path = self._verified_path(step)
        with _explain_read_errors(path):
            return _restore_tree(path, {name: abstract_tree}, require_all=False)[name]

    def read_shapes(self, step: int, name: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the arrays of one field of a step's state, by tree path below it."""
        path = self._verified_path(step)
        with _explain_read_errors(path):
            stored = _read_json(path, LEAVES_ITEM)
        prefix = f"{name}/"
        return {
            each.removeprefix(prefix): tree_paths.parse_leaf(text)
            for each, text in stored.items()
            if each.startswith(prefix)
        }

    def read_metadata(self, step: int) -> dict[str, Any]:
        """Return the metadata saved with a step (UserError: as in `restore`)."""
        path = self._verified_path(step)
        with _explain_read_errors(path):
            return _read_json(path, METADATA_ITEM)

    def close(self) -> None:
        """Wait for the save in progress and stop all threads."""
        try:
            self.wait()
        finally:
            if self._orbax is not None:
                self._orbax.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error of the devices, another process may have gone, for which a save in progress
        # would wait. Without one, Python waits for the save when it exits.
        if jax.process_count() == 1 or not isinstance(error, jax.errors.JaxRuntimeError):
            self.close()

    def _complete_steps(self) -> list[int]:
        with as_user_error(str(self.directory)):
            # Orbax leaves out unfinished saves, and names that are no steps.
            names = ocp.path.step.standard_name_format()
            return sorted(each.step for each in names.find_all(self.directory))

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

    @contextlib.contextmanager
    def _explain_write_errors(self, step: int) -> Iterator[None]:
        """Raise a UserError in place of the errors of Orbax and TensorStore."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise UserError(
                f"checkpoint {self.directory / str(step)}: could not be written "
                f"({_cause(error)}); make room there or check its permissions; "
                "the checkpoints before it are whole"
            ) from error


class _OrbaxManager(ocp.CheckpointManager):
    """Orbax's manager without its question for a preemption.

    JAX counts the questions of each process, and `train.runtime.signals` asks after each step.
    Orbax asks with other numbers, from a thread too; the processes would then agree on a step that
    one of them never reaches.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


def _make_orbax_manager(directory: epath.Path, retention: RetentionPolicy) -> _OrbaxManager:
    """Return the manager of a directory, and delete what killed saves have left in it."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(STATE_ITEM, args.PyTreeSave)
    registry.add(LEAVES_ITEM, args.JsonSave)
    registry.add(METADATA_ITEM, args.JsonSave)
    # Last: items are finalized in this order.
    registry.add(MANIFEST_ITEM, args.JsonSave, ManifestHandler())
    return _OrbaxManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=retention, cleanup_tmp_directories=True, save_root_metadata=False
        ),
        handler_registry=registry,
    )


def no_valid_checkpoint_error(
    directory: epath.Path, skipped: Sequence[SkippedCheckpoint]
) -> UserError:
    """Return the error for a directory in which every checkpoint is damaged."""
    problems = "; ".join(
        f"step {each.step}: {each.problem}" for each in skipped[:_SHOWN_CHECKPOINTS]
    )
    hidden = len(skipped) - _SHOWN_CHECKPOINTS
    more = f"; and {hidden} more" if hidden > 0 else ""
    return UserError(
        f"checkpoints {directory}: none is intact ({problems}{more}); restore what was "
        f"saved, or train anew: {NEW_START_REMEDY}"
    )


def broadcast_integers(values: Sequence[int]) -> list[int]:
    """Return the values of process 0 on every process.

    This runs a program on the devices. A thread beside the training loop must not call it: the
    order of programs would differ between processes, and they would deadlock.
    """
    if jax.process_count() == 1:
        return list(values)
    # Their number first, so that all processes run the same program with an array of its length.
    broadcast = ocp.multihost.broadcast_one_to_all
    count = int(broadcast(np.int32(len(values))))
    sent = np.resize(np.array([*values, 0], np.int32), count)  # that of process 0 counts
    return [int(each) for each in broadcast(sent)] if count else []


def _restore_tree(path: epath.Path, abstract_tree: Any, *, require_all: bool) -> Any:
    """Restore arrays of a checkpoint, bit for bit, placed as the abstract ones.

    With `require_all`, raise if the checkpoint has arrays that the tree has not.
    """
    leaves = tree_paths.named_leaves(abstract_tree)
    requested = tree_paths.describe_leaves(leaves)
    # Shapes are compared before any array is read, so that the error names the parameters.
    difference = tree_paths.describe_difference(
        _read_json(path, LEAVES_ITEM), requested, require_all=require_all
    )
    if difference:
        raise UserError(
            f"checkpoint {path}: is of another model ({difference}); "
            "use the settings it was trained with, or another --workdir"
        )
    # A sharding for every array, since Orbax would otherwise take the one that was saved, whose
    # devices this machine may not have.
    structs = {name: _with_sharding(leaf) for name, leaf in leaves.items()}
    tree = tree_paths.nest_leaves(structs)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        restored = reader.restore(
            path / STATE_ITEM,
            args=args.PyTreeRestore(
                tree,
                restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
                partial_restore=not require_all,
            ),
        )
    empty = {  # not stored: `nest_leaves` leaves them out
        name: jnp.empty(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in structs.items()
        if not leaf.size
    }
    arrays = tree_paths.flatten_leaves(restored) | empty
    # The digests do not show what Orbax makes of the files. Without its own metadata file, for
    # example, it restores random keys as plain integers.
    if tree_paths.describe_leaves({name: arrays[name] for name in requested}) != requested:
        raise ValueError("types were lost")
    structure = jax.tree_util.tree_structure(abstract_tree)
    return jax.tree_util.tree_unflatten(structure, [arrays[name] for name in requested])


def _read_json(path: epath.Path, item: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / item / JSON_FILE).read_text())
    return content


def _with_sharding(leaf: Leaf) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@contextlib.contextmanager
def _explain_read_errors(path: epath.Path) -> Iterator[None]:
    """Raise a UserError in place of Orbax's and TensorStore's errors about damaged files."""
    try:
        yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # `explain_oom` says what to do about a lack of memory
    except Exception as error:
        raise UserError(
            f"checkpoint {path}: cannot be read ({_cause(error)}); with --checkpoint.verify full a "
            "damaged one is skipped"
        ) from error


def _cause(error: Exception) -> str:
    """Return the cause of an error on one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # TensorStore puts the operating system's error code at the end of a very long line.
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return short_reason(error)
