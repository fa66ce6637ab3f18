"""An update that may turn out not to be made."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def apply_if_accepted(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The same, whose `update` is told whether all is `fine`: if not, its state stays as it is."""

    def update(
        grads: Any, state: Any, params: Any = None, *, fine: jax.Array, **_: Any
    ) -> tuple[Any, Any]:
        directions, new = optimizer.update(grads, state, params)
        return directions, tree_where(fine, new, state)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def tree_where(condition: jax.Array, new: Any, old: Any) -> Any:
    """The new tree if all is fine, else the old one."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
