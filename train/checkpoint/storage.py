"""Reading back what Orbax wrote, before a checkpoint counts.

The manifest lists the files that are there, so it would seal a checkpoint that lacks some. Orbax
merges what each process wrote into one index (TensorStore's OCDBT); where that step finds nothing
to merge it reports success, and the arrays cannot be found by their names.

Reading a checkpoint: all of a state or a part, bit for bit or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args

from train.checkpoint import errors, tree_paths
from train.checkpoint.manifest import AUTO_VERIFY_BYTES
from train.errors import UserError
from train.run_folder.regular_files import is_local

_AT_ONCE = 64


def check_arrays_readable(
    folder: epath.Path,
    arrays: Mapping[str, tree_paths.Leaf],
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> None:
    """Read the arrays of a checkpoint back as far as storage goes; nothing is decoded.

    Args:
      folder: Where Orbax wrote the arrays.
      arrays: What it was given, by name.
      host: This process, which reads its share of the data.
      hosts: Number of processes.

    Raises:
      OSError: An array, or a part of one, is not there.
    """
    import tensorstore

    stored = {name.replace("/", "."): leaf for name, leaf in arrays.items() if leaf.size}
    try:
        store = tensorstore.KvStore.open(_spec(folder), context=tensorstore.Context()).result()
        entries = set(store.list().result())
    except Exception as error:
        if not is_local(folder):
            return  # settings that only Orbax knows; its own error would have been raised before
        raise OSError(f"the index of its arrays cannot be read: {error}") from error
    arrays_found: dict[str, list[bytes]] = {}
    for entry in entries:
        arrays_found.setdefault(entry.decode().rpartition("/")[0], []).append(entry)
    chunks = []
    for name, leaf in stored.items():
        about = f"{name}/.zarray".encode()
        if about not in entries:
            raise OSError(f"array {name} is not in the index that Orbax wrote")
        found = [entry for entry in arrays_found[name] if entry != about]
        if len(found) < _count(json.loads(store.read(about).result().value), leaf):
            raise OSError(f"array {name} is not whole in the index that Orbax wrote")
        chunks += found
    if sum(leaf.size * _width(leaf) for leaf in stored.values()) > AUTO_VERIFY_BYTES:
        return  # the index alone has to do: reading all would take minutes
    mine = sorted(chunks)[process_index::process_count]
    for begin in range(0, len(mine), _AT_ONCE):
        batch = mine[begin : begin + _AT_ONCE]
        for entry, read in zip(batch, [store.read(each) for each in batch], strict=True):
            # TensorStore reads a data file that is missing as an empty value.
            if not read.result().value:
                raise OSError(f"array {entry.decode()} cannot be read back")


def _count(metadata: dict[str, Any], leaf: tree_paths.Leaf) -> int:
    """Return the number of chunks of an array (at least those of Zarr version 2's grid)."""
    if tuple(metadata["shape"])[: leaf.ndim] != tuple(leaf.shape):
        raise OSError(f"an array of shape {leaf.shape} was written as {metadata['shape']}")
    pairs = zip(metadata["shape"], metadata["chunks"], strict=True)
    return math.prod(-(-size // chunk) for size, chunk in pairs)


def _width(leaf: tree_paths.Leaf) -> int:
    return getattr(leaf.dtype, "itemsize", 4)


def _spec(folder: epath.Path) -> dict[str, Any]:
    path = f"{os.fspath(folder).rstrip('/')}/"
    base = {"driver": "file", "path": path} if is_local(folder) else path
    return {"driver": "ocdbt", "base": base}


STATE_ITEM, LEAVES_ITEM, METADATA_ITEM = "state", "leaves", "extra"
"""What a checkpoint is made of: the arrays, what they are, and what else is kept."""


class RestoredCheckpoint(NamedTuple):
    """What `Checkpoints.save` was given."""

    state: Any
    metadata: dict[str, Any]


def restore_checkpoint(
    path: epath.Path, abstract_tree: Any, *, require_all: bool
) -> RestoredCheckpoint:
    """The arrays of a checkpoint that `abstract_tree` has: all that there are if `replicated_per_row`.

    Raises UserError if it is of a model with other parameters, or cannot be read.
    """
    wanted = tree_paths.named_leaves(abstract_tree)
    descriptions = {name: tree_paths.describe_leaf(leaf) for name, leaf in wanted.items()}
    with errors.explain_restore_errors(path):
        about = _read(path, {name: args.JsonRestore() for name in (LEAVES_ITEM, METADATA_ITEM)})
        if found := tree_paths.describe_difference(
            about[LEAVES_ITEM], descriptions, require_all=require_all
        ):
            raise UserError(
                f"checkpoint {path}: is of another model ({found}); "
                "use the settings it was trained with, or another --workdir"
            )
        arrays = _arrays(path, wanted, require_all)
    if any(tree_paths.describe_leaf(arrays[name]) != descriptions[name] for name in wanted):
        raise errors.unreadable_error(path, "types were lost")
    structure = jax.tree_util.tree_structure(abstract_tree)
    state = jax.tree_util.tree_unflatten(structure, [arrays[name] for name in wanted])
    return RestoredCheckpoint(state, about[METADATA_ITEM])


def read_metadata(path: epath.Path) -> dict[str, Any]:
    """What else was saved with a state (UserError: it cannot be read)."""
    with errors.explain_restore_errors(path):
        found: dict[str, Any] = _read(path, {METADATA_ITEM: args.JsonRestore()})[METADATA_ITEM]
    return found


def _arrays(
    there: epath.Path, wanted: Mapping[str, tree_paths.Leaf], whole: bool
) -> dict[str, jax.Array]:
    placed = {name: _placed(leaf) for name, leaf in wanted.items()}
    tree = tree_paths.nest_leaves(placed)
    how = args.PyTreeRestore(
        tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=not whole,
    )
    restored = _read(there, {STATE_ITEM: how})
    empty = {
        name: jnp.empty(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in placed.items()
        if not leaf.size
    }
    return tree_paths.flatten_leaves(restored[STATE_ITEM]) | empty


def _read(there: epath.Path, items: Mapping[str, Any]) -> Any:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(there, args=args.Composite(**items))


def _placed(leaf: tree_paths.Leaf) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
