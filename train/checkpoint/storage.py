"""Write checkpoints in the background and read them back, through Orbax.

A checkpoint has three Orbax items: the arrays, their dtypes and shapes, and JSON metadata.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args

from train.checkpoint import errors, retention, tree_paths
from train.checkpoint.commit import commit_checkpoint
from train.checkpoint.manifest import LEAVES_ITEM, METADATA_ITEM, STATE_ITEM
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
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, Future[None]] | None = None

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
            LEAVES_ITEM: args.JsonSave(descriptions),
            METADATA_ITEM: args.JsonSave(json.loads(json.dumps(metadata))),
        }
        with self._explain_errors(step):
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                retention.delete_unfinished(self.directory)
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
        self._thread.shutdown()
        with contextlib.suppress(OSError, ValueError):  # `wait` has already raised this error
            self._orbax.close()

    def _finish(
        self, step: int, shapes: Mapping[str, Leaf], steps_to_delete: Collection[int]
    ) -> None:
        """Commit the checkpoint, then delete older ones. Runs on the background thread."""
        self._orbax.wait_until_finished()
        commit_checkpoint(self.directory / str(step), shapes)
        # Deleting comes last: at every moment the newest committed checkpoint exists.
        if jax.process_index() == 0:
            for old in steps_to_delete:
                retention.delete_checkpoint(self.directory, old)

    @contextlib.contextmanager
    def _explain_errors(self, step: int) -> Iterator[None]:
        """Clean up after a failed save and raise a UserError in place of Orbax's error."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._saving = None
            self._drain_errors()
            if jax.process_index() == 0:
                # What is left of a failed save may be what fills the disk.
                with contextlib.suppress(OSError, UserError):
                    retention.delete_unfinished(self.directory)
            path = self.directory / str(step)
            raise errors.unwritable_error(path, errors.short_reason(error)) from error

    def _drain_errors(self) -> None:
        """Wait until no item of a failed save is left.

        Orbax raises the error of one item at a time. An error that stays behind would be raised
        by the next save, which may be fine.
        """
        for _ in range(_MAX_ITEMS):
            with contextlib.suppress(OSError, ValueError):
                self._orbax.wait_until_finished()
                return


class RestoredCheckpoint(NamedTuple):
    """State and metadata, as given to `CheckpointManager.save`."""

    state: Any
    metadata: dict[str, Any]


def restore_checkpoint(
    path: epath.Path, abstract_tree: Any, *, require_all: bool
) -> RestoredCheckpoint:
    """Restore the arrays of a checkpoint, bit for bit.

    Args:
      path: Folder of the checkpoint.
      abstract_tree: Tree of `jax.ShapeDtypeStruct`. An array goes to the sharding of its struct,
        or to the first local device.
      require_all: Raise if the checkpoint has arrays that the tree has not.

    Raises:
      UserError: The checkpoint has other parameters, shapes or dtypes, or cannot be read.
    """
    wanted = tree_paths.named_leaves(abstract_tree)
    descriptions = {name: tree_paths.describe_leaf(leaf) for name, leaf in wanted.items()}
    with errors.explain_restore_errors(path):
        # Shapes are compared before any array is read, so that the error names the parameters.
        items = _read_items(
            path, {name: args.JsonRestore() for name in (LEAVES_ITEM, METADATA_ITEM)}
        )
        difference = tree_paths.describe_difference(
            items[LEAVES_ITEM], descriptions, require_all=require_all
        )
        if difference:
            raise UserError(
                f"checkpoint {path}: is of another model ({difference}); "
                "use the settings it was trained with, or another --workdir"
            )
        arrays = _read_arrays(path, wanted, partial=not require_all)
    # Without its own metadata file, Orbax restores random keys as plain integers.
    if any(tree_paths.describe_leaf(arrays[name]) != descriptions[name] for name in wanted):
        raise errors.unreadable_error(path, "types were lost")
    structure = jax.tree_util.tree_structure(abstract_tree)
    state = jax.tree_util.tree_unflatten(structure, [arrays[name] for name in wanted])
    return RestoredCheckpoint(state, items[METADATA_ITEM])


def read_metadata(path: epath.Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint (UserError: it cannot be read)."""
    with errors.explain_restore_errors(path):
        items = _read_items(path, {METADATA_ITEM: args.JsonRestore()})
        metadata: dict[str, Any] = items[METADATA_ITEM]
    return metadata


def _read_arrays(
    path: epath.Path, wanted: Mapping[str, Leaf], *, partial: bool
) -> dict[str, jax.Array]:
    structs = {name: _with_sharding(leaf) for name, leaf in wanted.items()}
    tree = tree_paths.nest_leaves(structs)
    request = args.PyTreeRestore(
        tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=partial,
    )
    restored = _read_items(path, {STATE_ITEM: request})
    empty = {  # not stored: `nest_leaves` leaves them out
        name: jnp.empty(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in structs.items()
        if not leaf.size
    }
    return tree_paths.flatten_leaves(restored[STATE_ITEM]) | empty


def _read_items(path: epath.Path, items: Mapping[str, Any]) -> Any:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(path, args=args.Composite(**items))


def _with_sharding(leaf: Leaf) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
