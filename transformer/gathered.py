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
from transformer.shared import Constrain

OF_TOKENS = ("batch", "length", None)
OF_EXPERTS = ("experts", "batch", "length", None)
"""Where [E, B, T, D] lies: with the experts, and with the tokens as far as devices are left."""


def spreads_experts(routing: Routing, constrain: Constrain) -> bool:
    """Whether experts lie on several devices, and this batch divides among all of them."""
    parts, count = constrain.parts("experts"), routing.probabilities.shape[-1]
    return parts > 1 and count % parts == 0 and len(routing.experts) % constrain.parts("batch") == 0


class Gathered(NamedTuple):
    """All tokens for each expert, on the expert's device: rows are [E, B, T, D]."""

    routing: Routing
    constrain: Constrain

    def spread(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [E, B, T, D]."""
        axis, each = self._share()
        spec, of_experts = self.constrain.spec, (self._count, *x.shape)

        def gather(x: jax.Array) -> jax.Array:
            x = jax.lax.all_gather(x, axis, tiled=True)
            return jnp.broadcast_to(x[None], (each, *x.shape))

        return jax.shard_map(
            gather,
            mesh=self.constrain.mesh,
            in_specs=spec(OF_TOKENS, x.shape),
            out_specs=spec(OF_EXPERTS, of_experts),
            check_vma=False,
        )(x)

    def product(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        """[E, B, T, D], [E, D, F] -> [E, B, T, F]."""
        return jnp.einsum("EBTD,EDF->EBTF", rows, matrices)

    def vectors(self, each: jax.Array) -> jax.Array:
        """[E, F] -> [E, 1, 1, F]."""
        return each[:, None, None]

    def collect(self, rows: jax.Array) -> jax.Array:
        """[E, B, T, D] -> [B, T, D]."""
        axis, each = self._share()
        spec, routing = self.constrain.spec, self.routing
        chosen = spec(OF_TOKENS, routing.experts.shape)

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
            in_specs=(spec(OF_EXPERTS, rows.shape), chosen, chosen),
            out_specs=spec(OF_TOKENS, rows.shape[1:]),
            check_vma=False,
        )(rows, routing.experts, routing.gates)

    @property
    def _count(self) -> int:
        return self.routing.probabilities.shape[-1]

    def _share(self) -> tuple[str, int]:
        """The axis of the mesh along which experts lie, and how many a device has."""
        (axis,) = self.constrain.spec(("experts",), (self._count,))
        assert isinstance(axis, str)
        return axis, self._count // self.constrain.parts("experts")
