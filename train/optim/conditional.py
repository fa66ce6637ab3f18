"""Updates that take effect only if they are accepted: the step rejects those of an anomaly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import optax


def apply_if_accepted(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with one more argument of `update`, the boolean `accept_update`.

    If it is False, the new state is the old one. The directions are those of an accepted update.
    """
    import optax

    def update(
        grads: Any, state: Any, params: Any = None, *, accept_update: jax.Array, **_: Any
    ) -> tuple[Any, Any]:
        directions, new_state = optimizer.update(grads, state, params)
        return directions, tree_where(accept_update, new_state, state)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def tree_where(condition: jax.Array, new: Any, old: Any) -> Any:
    """Return `jnp.where(condition, new, old)` for every leaf.

    Not `lax.cond`: XLA fuses this selection into the update, which reads both values anyway. The
    branches of a `cond` are programs of their own, which nothing around them is fused with.
    """
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
