"""The arrays of a state by name, so that a checkpoint can say what it holds and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

Leaf = jax.Array | jax.ShapeDtypeStruct


def named_leaves(tree: Any) -> dict[str, Leaf]:
    """The leaves of a tree, in its order, under names like ``params/block/mixer/q/kernel``.

    A dict's key, a field's name and a place in a tuple all become a part of the name.
    """
    leaves: dict[str, Leaf] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(leaf, Leaf):
            raise TypeError(f"{name}: is a {type(leaf).__name__}; a checkpoint holds jax arrays")
        if name in leaves:
            raise ValueError(f"{name}: two arrays have this name")
        leaves[name] = leaf
    return leaves


def nest_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The same in dicts of dicts, as those who read a checkpoint without us will see it.

    Arrays without elements are left out: Orbax cannot store them, and their shape says it all.
    """
    return unflatten_dict({n: leaf for n, leaf in leaves.items() if leaf.size}, sep="/")


def flatten_leaves(tree: dict[str, Any]) -> dict[str, jax.Array]:
    """What `nested` was given."""
    return flatten_dict(tree, sep="/")


def describe_leaf(leaf: Leaf) -> str:
    """Dtype and shape: ``float32[512,64]``, ``key<fry>[]``."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def describe_difference(
    stored: Mapping[str, str], wanted: Mapping[str, str], *, require_all: bool
) -> str | None:
    """What keeps a checkpoint from being restored, in words; None if nothing does.

    Args:
      stored: What `describe` says of each leaf of the checkpoint, by name.
      wanted: The same of each leaf that is asked for.
      whole: Whether a leaf that nobody asked for is a difference.
    """
    both = [name for name in wanted if name in stored]
    others = [
        f"{n} is {stored[n]} there and {wanted[n]} here" for n in both if stored[n] != wanted[n]
    ]
    missing = [f"{name} is not in it" for name in wanted if name not in stored]
    besides = [f"{name} is in it besides" for name in stored if require_all and name not in wanted]
    found = others + missing + besides
    if not found:
        return None
    more = f", and {len(found) - 2} more differences" if len(found) > 2 else ""
    return ", ".join(found[:2]) + more
