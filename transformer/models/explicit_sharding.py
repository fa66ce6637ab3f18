"""Run a model on arrays of a mesh with explicit axes, the default of `jax.make_mesh` in jax 0.10.

With explicit axes the sharding is part of an array's type, and an operation must state the sharding
of its result where it is ambiguous, as in a lookup in the embedding table. The models leave all
shardings to the compiler instead: they run under `jax.sharding.auto_axes`, and only their results
have explicit shardings again.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from transformer.models.model import ModelOutput


def call_with_auto_axes(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    example: jax.Array,
) -> Any:
    """Return `function(*args, **kwargs)`, computed with all axes of a mesh left to the compiler.

    The batch of the output is sharded as that of the inputs, and the cache as the cache that is
    given. All else is whole on each device.

    Args:
      function: `init_with_output` or `apply` of a model.
      args: Random key or parameters, then the inputs, whose first axis is the batch.
      kwargs: More inputs, and static arguments.
      example: One of the arrays, whose mesh has explicit axes.
    """
    mesh = jax.typeof(example).sharding.mesh
    leaves, tree = jax.tree.flatten((args, kwargs))

    def call(arrays: list[jax.Array]) -> Any:
        rest = iter(arrays)
        merged = [next(rest) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(tree, merged)
        return function(*args, **kwargs)

    def sharding_of(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, jax.typeof(leaf).sharding.spec)

    inputs = [leaf for leaf in jax.tree.leaves((args[1:], kwargs)) if isinstance(leaf, jax.Array)]
    axes = sharding_of(inputs[0]).spec[:1] if inputs else ()
    batch, replicated = (NamedSharding(mesh, PartitionSpec(*each)) for each in (axes, ()))
    cache = jax.tree.map(sharding_of, kwargs.get("cache"))
    # A prefix of the result's tree. A method other than `__call__` may return anything.
    prefix: Any = (batch, batch, cache, replicated)
    output = replicated if "method" in kwargs else ModelOutput(*prefix)
    with_variables = "init" in function.__name__ or kwargs.get("mutable", False) is not False
    out_sharding = (output, replicated) if with_variables else output
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    run = jax.sharding.auto_axes(call, out_sharding=out_sharding)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return run(arrays)
    # Outside of `jit`, initial parameters can be placed on a mesh of devices alone.
    sharding: Any = example.sharding
    with jax.set_mesh(sharding.mesh):
        return run(arrays)
