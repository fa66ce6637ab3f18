"""Reading a checkpoint: all of a state or a part, bit for bit or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import args

from train import leaves
from train.checkpoints import words
from train.errors import UserError

STATE, LEAVES, EXTRA = "state", "leaves", "extra"
"""What a checkpoint is made of: the arrays, what they are, and what else is kept."""


class Restored(NamedTuple):
    """What `Checkpoints.save` was given."""

    state: Any
    extra: dict[str, Any]


def restore(there: epath.Path, like: Any, *, whole: bool) -> Restored:
    """The arrays of a checkpoint that `like` has: all that there are if `replicated_per_row`.

    Raises UserError if it is of a model with other parameters, or cannot be read.
    """
    wanted = leaves.named(like)
    descriptions = {name: leaves.describe(leaf) for name, leaf in wanted.items()}
    with words.explained_restore(there):
        about = _read(there, {name: args.JsonRestore() for name in (LEAVES, EXTRA)})
        if found := leaves.difference(about[LEAVES], descriptions, whole=whole):
            raise UserError(
                f"checkpoint {there}: is of another model ({found}); "
                "use the settings it was trained with, or another --workdir"
            )
        arrays = _arrays(there, wanted, whole)
    if any(leaves.describe(arrays[name]) != descriptions[name] for name in wanted):
        raise words.unreadable(there, "types were lost")
    structure = jax.tree_util.tree_structure(like)
    state = jax.tree_util.tree_unflatten(structure, [arrays[name] for name in wanted])
    return Restored(state, about[EXTRA])


def extra(there: epath.Path) -> dict[str, Any]:
    """What else was saved with a state (UserError: it cannot be read)."""
    with words.explained_restore(there):
        found: dict[str, Any] = _read(there, {EXTRA: args.JsonRestore()})[EXTRA]
    return found


def _arrays(
    there: epath.Path, wanted: Mapping[str, leaves.Leaf], whole: bool
) -> dict[str, jax.Array]:
    placed = {name: _placed(leaf) for name, leaf in wanted.items()}
    tree = leaves.nested(placed)
    how = args.PyTreeRestore(
        tree,
        restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
        partial_restore=not whole,
    )
    restored = _read(there, {STATE: how})
    empty = {
        name: jnp.empty(leaf.shape, leaf.dtype, device=leaf.sharding)
        for name, leaf in placed.items()
        if not leaf.size
    }
    return leaves.flat(restored[STATE]) | empty


def _read(there: epath.Path, items: Mapping[str, Any]) -> Any:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(there, args=args.Composite(**items))


def _placed(leaf: leaves.Leaf) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
