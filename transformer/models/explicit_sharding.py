"""Run a model on arrays of a mesh with explicit axes, the default of `jax.make_mesh` in jax 0.10.

With explicit axes the sharding is part of an array's type, and an operation must state the sharding
of its result where it is ambiguous, as in a lookup in the embedding table. The models leave all
shardings to the compiler instead: they run under `jax.sharding.auto_axes`, and only their results
have explicit shardings again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from transformer.model_context import has_explicit_axes
from transformer.models.model import ModelOutput


def with_auto_axes(
    function: Callable[..., Any], *, replicate_result: bool = False
) -> Callable[..., Any]:
    """Return a model's `apply` or `init`, computed with all axes of a mesh left to the compiler.

        logits = with_auto_axes(model.apply)({"params": params}, tokens).logits

    Arrays without explicit axes go to the function as they are. The batch of a `ModelOutput` is
    sharded as that of the inputs, and the cache as the cache that is given. All else is whole on
    each device.

    Args:
      function: Of parameters, or a random key, and inputs whose first axis is the batch.
      replicate_result: The result is no `ModelOutput`: that of `init`, or of another method.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        explicit = [leaf for leaf in leaves if has_explicit_axes(leaf)]
        if not explicit:
            return function(*args, **kwargs)
        mesh = jax.typeof(explicit[0]).sharding.mesh

        def call_merged(arrays: list[jax.Array]) -> Any:
            rest = iter(arrays)
            merged = [next(rest) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
            args, kwargs = jax.tree.unflatten(tree, merged)
            return function(*args, **kwargs)

        def sharding_of(leaf: Any) -> NamedSharding:
            return NamedSharding(mesh, jax.typeof(leaf).sharding.spec)

        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        inputs = [
            leaf for leaf in jax.tree.leaves((args[1:], kwargs)) if isinstance(leaf, jax.Array)
        ]
        batch_axes = sharding_of(inputs[0]).spec[:1] if inputs else ()
        replicated = NamedSharding(mesh, PartitionSpec())
        out_sharding: Any = replicated
        if not replicate_result:
            batch = NamedSharding(mesh, PartitionSpec(*batch_axes))
            cache = jax.tree.map(sharding_of, kwargs.get("cache"))
            # A prefix of the result's tree.
            prefix: Any = batch, batch, cache, replicated, replicated
            out_sharding = ModelOutput(*prefix)
            if kwargs.get("mutable", False) is not False:
                out_sharding = out_sharding, replicated
        run = jax.sharding.auto_axes(call_merged, out_sharding=out_sharding)
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            return run(arrays)
        # Outside of `jit`, initial parameters can be placed on a mesh of devices alone.
        sharding: Any = explicit[0].sharding
        with jax.set_mesh(sharding.mesh):
            return run(arrays)

    return call
