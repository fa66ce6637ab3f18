"""Experts on several devices: each gets the tokens of all devices that share the experts.

No token is dropped, so nobody knows beforehand how many go where: all are gathered, and each device
adds up what its experts make of them. The sums go back to where the tokens came from
(`reduce-scatter`). With a capacity the numbers are known, and tokens go to their experts alone: see
`Slots` of `dispatch.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from transformer.routing import Routing
from transformer.shared import ActivationConstraint

TOKEN_AXES = ("batch", "length", None)
EXPERT_INPUT_AXES = ("experts", "batch", "length", None)
"""Where [E, B, T, D] lies: with the experts, and with the tokens as far as devices are left."""


def experts_are_sharded(routing: Routing, constrain: ActivationConstraint) -> bool:
    """Whether experts lie on several devices, and this batch divides among all of them."""
    parts, count = constrain.num_shards("experts"), routing.probabilities.shape[-1]
    return (
        parts > 1
        and count % parts == 0
        and len(routing.expert_indices) % constrain.num_shards("batch") == 0
    )


class AllGatherDispatcher(NamedTuple):
    """All tokens for each expert, on the expert's device: rows are [E, B, T, D]."""

    routing: Routing
    constrain: ActivationConstraint

    def dispatch(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [E, B, T, D]."""
        axis, each = self._share()
        spec, of_experts = self.constrain.partition_spec, (self._count, *x.shape)

        def gather(x: jax.Array) -> jax.Array:
            x = jax.lax.all_gather(x, axis, tiled=True)
            return jnp.broadcast_to(x[None], (each, *x.shape))

        return jax.shard_map(
            gather,
            mesh=self.constrain.mesh,
            in_specs=spec(TOKEN_AXES, x.shape),
            out_specs=spec(EXPERT_INPUT_AXES, of_experts),
            check_vma=False,
        )(x)

    def matmul(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        """[E, B, T, D], [E, D, F] -> [E, B, T, F]."""
        return jnp.einsum("EBTD,EDF->EBTF", rows, matrices)

    def broadcast(self, vectors: jax.Array) -> jax.Array:
        """[E, F] -> [E, 1, 1, F]."""
        return vectors[:, None, None]

    def combine(self, rows: jax.Array) -> jax.Array:
        """[E, B, T, D] -> [B, T, D]."""
        axis, each = self._share()
        spec, routing = self.constrain.partition_spec, self.routing
        chosen = spec(TOKEN_AXES, routing.expert_indices.shape)

        def add(rows: jax.Array, experts: jax.Array, gates: jax.Array) -> jax.Array:
            first = jax.lax.axis_index(axis) * each
            experts, gates = (jax.lax.all_gather(a, axis, tiled=True) for a in (experts, gates))
            own = first + jnp.arange(each)[:, None, None, None]
            weights = jnp.sum(jnp.where(experts[None] == own, gates[None], 0), axis=-1)
            y = jnp.sum(rows * weights[..., None].astype(rows.dtype), axis=0)
            return jax.lax.psum_scatter(y, axis, tiled=True)

        return jax.shard_map(
            add,
            mesh=self.constrain.mesh,
            in_specs=(spec(EXPERT_INPUT_AXES, rows.shape), chosen, chosen),
            out_specs=spec(TOKEN_AXES, rows.shape[1:]),
            check_vma=False,
        )(rows, routing.expert_indices, routing.gates)

    @property
    def _count(self) -> int:
        return self.routing.probabilities.shape[-1]

    def _share(self) -> tuple[str, int]:
        """The axis of the mesh along which experts lie, and how many a device has."""
        (axis,) = self.constrain.partition_spec(("experts",), (self._count,))
        assert isinstance(axis, str)
        return axis, self._count // self.constrain.num_shards("experts")
