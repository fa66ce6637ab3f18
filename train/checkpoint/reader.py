"""Read the arrays and the metadata of a checkpoint, through Orbax.

A checkpoint has three Orbax items: the arrays, their dtypes and shapes, and JSON metadata.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args

from train.checkpoint import tree_paths
from train.checkpoint.manifest import LEAVES_ITEM, METADATA_ITEM, STATE_ITEM
from train.checkpoint.tree_paths import Leaf
from train.errors import UserError, short_reason


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
    requested = tree_paths.named_leaves(abstract_tree)
    descriptions = {name: tree_paths.describe_leaf(leaf) for name, leaf in requested.items()}
    with _explain_errors(path):
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
        arrays = _read_arrays(path, requested, partial=not require_all)
    # The digests do not show what Orbax makes of the files. Without its own metadata file, for
    # example, it restores random keys as plain integers.
    if any(tree_paths.describe_leaf(arrays[name]) != descriptions[name] for name in requested):
        raise _unreadable_error(path, "types were lost")
    structure = jax.tree_util.tree_structure(abstract_tree)
    state = jax.tree_util.tree_unflatten(structure, [arrays[name] for name in requested])
    return RestoredCheckpoint(state, items[METADATA_ITEM])


def read_metadata(path: epath.Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint (UserError: it cannot be read)."""
    with _explain_errors(path):
        items = _read_items(path, {METADATA_ITEM: args.JsonRestore()})
        metadata: dict[str, Any] = items[METADATA_ITEM]
    return metadata


def _read_arrays(
    path: epath.Path, requested: Mapping[str, Leaf], *, partial: bool
) -> dict[str, jax.Array]:
    # A sharding for every array, since Orbax would otherwise take the one that was saved, whose
    # devices this machine may not have.
    structs = {name: _with_sharding(leaf) for name, leaf in requested.items()}
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
    # A new reader for each call. It starts in milliseconds, and Orbax keeps no state from a call
    # that failed.
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(path, args=args.Composite(**items))


def _with_sharding(leaf: Leaf) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _unreadable_error(path: epath.Path, problem: str) -> UserError:
    """Return the error for a checkpoint that passed verification and cannot be restored."""
    return UserError(
        f"checkpoint {path}: cannot be read ({problem}); with --checkpoint.verify full a "
        "damaged one is skipped"
    )


@contextlib.contextmanager
def _explain_errors(path: epath.Path) -> Iterator[None]:
    """Raise a UserError in place of Orbax's and TensorStore's errors about damaged files."""
    try:
        yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # `explain_oom` says what to do about a lack of memory
    except Exception as error:
        raise _unreadable_error(path, error_cause(error)) from error


def error_cause(error: Exception) -> str:
    """Return the cause of an error on one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # The message may quote a whole JSON spec over many lines; an error of this package is one line.
    # TensorStore puts the operating system's error code at the end of a very long line.
    if code := re.search(r"os_error_code='(\d+)'", str(error)):
        return os.strerror(int(code[1]))
    return short_reason(error)
