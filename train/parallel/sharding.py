"""Placement of arrays: one table from logical axes to mesh axes, and the shardings that follow.

Every weight and activation has logical axes ("embed", "mlp", "batch", ...). `LOGICAL_AXIS_RULES`
maps each to the mesh axes that split it. From it follow the shardings of batches (`engine.py`),
of the training state (parameters, EMA, optimizer) and of a model's activations: no other file names
a mesh axis to split an array.

XLA infers the sharding of every array that is not constrained, by propagation from those that are.
Batch and weights are both split over `fsdp`, so a product of them has two readings: gather the
weights, or gather the activations and keep the weights in shards. Constraining activations to the
axes of the batch leaves only the first one (`make_sharding_constraint`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.errors import UsageError
from train.parallel.mesh import MeshConfig
from transformer.hardware import Hardware
from transformer.layers.logical_axes import LogicalAxes
from transformer.model_context import ActivationConstraint, unconstrained
from transformer.models.model import Model, init_compiler_options

LOGICAL_AXIS_RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("context",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "embed": ("fsdp",),
    "latent": ("fsdp",),
    "query_latent": ("fsdp",),
    "experts": ("expert",),
}
"""Logical axis -> mesh axes that split it. Axes that are not listed are not split.

- Weights are split over `fsdp` along "embed", the one axis that nearly all matrices have; those of
  latent attention that lack it, along the latent. The batch
  is split over it too: devices of one fsdp group compute different rows and gather the weights of a
  layer when they reach it (Rajbhandari et al. 2020, ZeRO stage 3).
- The batch is split over `expert` as well: otherwise all devices of an expert group would compute
  the same attention.
- "heads" and "mlp" are the outputs of one matrix and the inputs of the next. Split alike, a block
  needs one all-reduce, after the second (Shoeybi et al. 2019, section 3)."""


def logical_to_sharding(mesh: Mesh, names: Sequence[str | None]) -> NamedSharding:
    """Return the sharding of an array whose dimensions have these logical axes; None: not split."""
    # A mesh axis can split one dimension only: the first that asks for it.
    # An attention output [batch, length, embed] has its batch split over `fsdp`, so "embed" is not.
    used: set[str] = set()
    spec: list[Any] = []
    for name in names:
        axes = tuple(axis for axis in mesh_axes(mesh, name) if axis not in used)
        used.update(axes)
        spec.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def mesh_axes(mesh: Mesh, name: str | None) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that split a logical axis."""
    # Axes of one device split nothing. Without them, a sharding and an error name what matters.
    return tuple(
        axis for axis in LOGICAL_AXIS_RULES.get(name or "", ()) if mesh.shape.get(axis, 1) > 1
    )


def num_shards(mesh: Mesh, name: str | None) -> int:
    """Return the number of shards of a logical axis."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(mesh, name))


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


REPLICABLE_AXES = ("kv_heads",)
"""Axes that are replicated if they have fewer entries than shards. Key-value heads are shared by
several query heads: each shard gets the key-value heads of its query heads."""


def init_on_devices(init: Callable[..., Any], abstract: Any, params: Any = None) -> Any:
    """Return an initial state or initial weights, every array created in its shards by one program.

    Args:
      init: The program. It takes `params`, if they are given.
      abstract: Shapes, dtypes and shardings of its result.
      params: Parameters that become a part of the result. They are donated (deleted).

    Waits for the program, so that an out-of-memory error is raised here: with jax 0.12 on CPU, a
    later read of an array that did not fit would hang.
    """
    # Output shardings reach the random number generators too: each device draws its own shard, and
    # none holds a whole weight, which may be larger than its memory.
    shardings = leaf_shardings(abstract)
    device = next(iter(jax.tree.leaves(shardings)[0].device_set))
    options = init_compiler_options(device.platform)
    given = {} if params is None else {"params": params}
    program = jax.jit(
        init, out_shardings=shardings, donate_argnames=tuple(given), compiler_options=options
    )
    return jax.block_until_ready(program(**given))


def place_params(mesh: Mesh, model: Model, logical_axes: Any) -> Any:
    """Return shapes and dtypes of a model's parameters, with the sharding of each."""
    shapes = jax.eval_shape(model.init_params, jax.random.key(0))
    return place_shapes(mesh, logical_axes, shapes)


def place_shapes(mesh: Mesh, logical_axes: Any, shapes: Any) -> Any:
    """Return shapes of parameters with the sharding of each."""
    shardings = parameter_shardings(mesh, logical_axes, shapes)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def leaf_shardings(tree: Any) -> Any:
    """Return the sharding of every leaf of a tree, which may be abstract."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def gather_to_host(array: jax.Array) -> np.ndarray:
    """Return the whole array, even if this process addresses only some of its shards."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def check_optimizer_placement(mesh: MeshConfig, hardware: Hardware) -> None:
    """Raise UsageError for host placement on devices that have no memory of their own."""
    if mesh.optimizer_placement == "host" and hardware.platform == "cpu":
        raise UsageError(
            "mesh.optimizer_placement host: a CPU computes in the host's memory already; "
            "set it to device"
        )


def host_memory_shardings(shardings: Any) -> Any:
    """Return the same shardings in pinned host memory, which devices access directly.

    Raises:
      UsageError: the devices are a described GPU topology, which lacks this memory in JAX.
    """
    # Pinned: pages that the operating system cannot move. Devices copy them without the CPU's help.
    pinned = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)
    if any(sharding.memory_kind is None for sharding in jax.tree.leaves(pinned)):
        raise UsageError(
            "mesh.optimizer_placement host: cannot be compiled for GPUs that are not here, since "
            "their description lacks host memory; give --compile-best 0 for an estimate"
        )
    return pinned


def parameter_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """Return the sharding of every parameter, from its logical axes."""
    return jax.tree.map(
        lambda a, s: checked_sharding(mesh, a.names, s.shape),
        axes,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, LogicalAxes),
    )


def checked_sharding(
    mesh: Mesh, names: Sequence[str | None], shape: Sequence[int]
) -> NamedSharding:
    """Return `logical_to_sharding` of an array that all shards divide; "kv_heads" may be whole.

    Raises:
      UsageError: A size is not divisible by the number of its shards.
    """

    def is_whole(name: str | None, size: int) -> bool:
        # An axis that divides the shards evenly may be whole on each of them.
        count = num_shards(mesh, name)
        return name in REPLICABLE_AXES and size % count != 0 and count % size == 0

    pairs = list(zip(names, shape, strict=True))
    kept = [None if is_whole(name, size) else name for name, size in pairs]
    sharding = logical_to_sharding(mesh, kept)
    for (name, size), entry in zip(pairs, sharding.spec, strict=True):
        axes = _axis_names(entry)
        count = math.prod(mesh.shape[axis] for axis in axes)
        if size % count:
            sizes = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
            divisors = [str(each) for each in range(1, count) if size % each == 0]
            fields = " x ".join(f"mesh.{axis}" for axis in axes)
            raise UsageError(
                f"axis {name} of size {size}: does not divide into {count} parts (mesh {sizes}); "
                f"give {fields} of {' or '.join(divisors)}"
            )
    return sharding


def optimizer_state_shardings(
    state: Any, shapes: Any, shardings: Any, default: NamedSharding
) -> Any:
    """Return the sharding of every array of an optimizer state.

    optax keeps moments in trees with the structure of the parameters, inside states of its own: a
    leaf whose path ends with the path of a parameter belongs to it. It gets the parameter's
    sharding if it has its shape. Otherwise (row means, scales of blocks) it gets the sharding of
    the leading axes that both have, where they divide.

    Args:
      state: Shapes of the optimizer state.
      shapes: Shapes of the parameters.
      shardings: Shardings of the parameters.
      default: Sharding of leaves that belong to no parameter (step counts, coefficients).
    """
    # optax states are named tuples of a library that may nest them differently tomorrow. The names
    # of parameters at the end of a path are the project's own.
    by_path = {
        _path_names(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), strict=True
        )
    }

    def leaf_sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = _path_names(path)
        # The longest suffix first: `layers/norm/scale` must not be taken for a parameter `scale`.
        suffixes = (names[start:] for start in range(len(names)))
        parameter = next((by_path[suffix] for suffix in suffixes if suffix in by_path), None)
        if parameter is None:
            return default
        shape, sharding = parameter
        return sharding if leaf.shape == shape else _leading_axes(sharding, leaf.shape)

    return jax.tree_util.tree_map_with_path(leaf_sharding, state)


def _leading_axes(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding for another shape: axis by axis, where the number of shards divides."""
    # Row means and scales of blocks drop trailing axes of the parameter, or shorten them. Leading
    # axes keep their meaning. Were one taken for another, only the placement would be worse.
    spec = []
    for axes, size in zip(sharding.spec, shape, strict=False):
        shards = math.prod(sharding.mesh.shape[name] for name in _axis_names(axes))
        spec.append(axes if size % shards == 0 else None)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _axis_names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a `PartitionSpec`: a name, several or None."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _path_names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def make_sharding_constraint(mesh: Mesh) -> ActivationConstraint:
    """Return the function with which a model constrains the sharding of its activations.

    It does nothing on one device, and leaves axes whole that do not divide: a model trained on many
    devices also runs on a single example.
    """
    if mesh.size == 1:
        return unconstrained
    # Models run with automatic axes, whatever the axes of their inputs are.
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    return _ShardingConstraint(Mesh(mesh.devices, mesh.axis_names, axis_types=auto))


@dataclasses.dataclass(frozen=True)
class _ShardingConstraint:
    """Constraint of activations to a mesh. Hashable, as the modules that hold it must be."""

    mesh: Mesh

    def __call__(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        # Inside `jit` this is a hint that moves data where needed, and never a change of values.
        sharding = logical_to_sharding(self.mesh, self._divisible_axes(axes, x.shape))
        return jax.lax.with_sharding_constraint(x, sharding)

    def num_shards(self, axis: str) -> int:
        return num_shards(self.mesh, axis)

    def partition_spec(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        return logical_to_sharding(self.mesh, self._divisible_axes(axes, shape)).spec

    def _divisible_axes(
        self, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> tuple[str | None, ...]:
        """Return the axes with None for each that its number of shards does not divide."""
        # Parameters that do not divide are an error. Activations are not: prompts have any length,
        # and `sample` has a batch of one.
        sizes = zip(axes, shape, strict=True)
        return tuple(
            name if name and size % self.num_shards(name) == 0 else None for name, size in sizes
        )
