"""Name the arrays of a state by their tree path, e.g. `params/layers/place_0/mixer/query`.

A checkpoint stores these names with each array's dtype and shape. They let an error message say
which parameter differs, before any array is read.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

Leaf = jax.Array | jax.ShapeDtypeStruct

_SHOWN_DIFFERENCES = 2


def named_leaves(tree: Any) -> dict[str, Leaf]:
    """Return the leaves of a pytree by path, in tree order.

    Dict keys, field names and tuple indices are the components of a path.

    Raises:
      TypeError: A leaf is not a JAX array or `jax.ShapeDtypeStruct`.
      ValueError: Two leaves have the same path.
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
    """Return named leaves as nested dicts, the layout that other readers of a checkpoint see.

    Empty arrays are left out: Orbax cannot store them, and their shape is all they hold.
    """
    return unflatten_dict({n: leaf for n, leaf in leaves.items() if leaf.size}, sep="/")


def flatten_leaves(tree: dict[str, Any]) -> dict[str, jax.Array]:
    """Return nested dicts as named leaves: the inverse of `nest_leaves`."""
    return flatten_dict(tree, sep="/")


def describe_leaves(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Return dtype and shape of each leaf, e.g. `float32[512,64]` or `key<fry>[]`."""
    return {
        name: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for name, leaf in leaves.items()
    }


def parse_leaf(text: str) -> jax.ShapeDtypeStruct:
    """Return the shape of an array from its description by `describe_leaves`."""
    dtype, _, sizes = text.removesuffix("]").partition("[")
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, sizes.split(",")))), jnp.dtype(dtype))


def describe_difference(
    stored: Mapping[str, str], requested: Mapping[str, str], *, require_all: bool
) -> str | None:
    """Describe why a checkpoint does not match the requested tree; None if it matches.

    Both are results of `describe_leaves`. With `require_all`, a stored leaf that is not requested
    is a difference.
    """
    changed = [
        f"{n} is {stored[n]} there and {requested[n]} here"
        for n in requested
        if n in stored and stored[n] != requested[n]
    ]
    missing = [f"{n} is not in it" for n in requested if n not in stored]
    unexpected = [
        f"{n} is in it and not in this model" for n in stored if require_all and n not in requested
    ]
    differences = changed + missing + unexpected
    if not differences:
        return None
    hidden = len(differences) - _SHOWN_DIFFERENCES
    more = f", and {hidden} more differences" if hidden > 0 else ""
    return ", ".join(differences[:_SHOWN_DIFFERENCES]) + more
