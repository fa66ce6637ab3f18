"""How tokens reach their experts and come back.

`Dense` has every expert look at every token: E / C times the work, and the fastest where ragged
products are slow or tokens are spread over devices. `Sorted` puts tokens in the order of their
experts and computes none in vain; it gives the same numbers. `Slots` gives each expert so many
places in each example, and a token that finds none left is dropped.
"""

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from transformer.routing import Routing
from transformer.shared import Constrain, unconstrained

AT_TOKENS = ("batch", None, None, None)
AT_EXPERTS = ("experts", "batch", None, None)
"""Where slots lie [B, E, places, D] or [E, B, places, D]: with their tokens, or with their experts.
From one to the other, each device sends to each other what is its."""


class Dispatch(Protocol):
    """Rows are tokens as the experts see them, each kind in its own arrangement."""

    def spread(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> rows of D
        """The experts' inputs."""

    def product(
        self,
        rows: jax.Array,  # rows of D
        matrices: jax.Array,  # [E, D, F]
    ) -> jax.Array:  # rows of F
        """Each row times the matrix of its expert."""

    def vectors(self, each: jax.Array) -> jax.Array:  # [E, F] -> rows of F, or like them
        """A vector of each expert, for its rows."""

    def collect(self, rows: jax.Array) -> jax.Array:  # rows of D -> [B, T, D]
        """The results of each token's experts, times their gates, summed."""


class Dense(NamedTuple):
    """All tokens for each expert: rows are [E, B T, D], or [E, B, T, D] if T is spread."""

    routing: Routing
    constrain: Constrain = unconstrained

    def spread(self, x: jax.Array) -> jax.Array:
        count = self.routing.probabilities.shape[-1]
        x = x if self.constrain.parts("length") > 1 else x.reshape(-1, x.shape[-1])
        return jnp.broadcast_to(x[None], (count, *x.shape))

    def product(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        if rows.ndim == 4:  # both axes of tokens are split over devices
            return jnp.einsum("EBTD,EDF->EBTF", rows, matrices)
        return rows @ matrices

    def vectors(self, each: jax.Array) -> jax.Array:
        return each[:, None] if self.constrain.parts("length") == 1 else each[:, None, None]

    def collect(self, rows: jax.Array) -> jax.Array:
        experts, gates = self.routing.experts, self.routing.gates
        asked = experts[None] == jnp.arange(len(rows))[:, None, None, None]  # [E, B, T, C]
        weights = jnp.sum(jnp.where(asked, gates[None], 0), axis=-1).astype(rows.dtype)
        rows = rows.reshape(*weights.shape, -1)
        return jnp.sum(rows * weights[..., None], axis=0)


class Sorted(NamedTuple):
    """The C B T pairs of a token and an expert in the experts' order: rows are [C B T, D]."""

    routing: Routing
    order: jax.Array  # [C B T] the pair that stands at each row
    owners: jax.Array  # [C B T] the expert of each row
    sizes: jax.Array  # [E] rows of each expert

    @staticmethod
    def of(routing: Routing) -> "Sorted":
        experts = routing.experts.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=routing.probabilities.shape[-1])
        return Sorted(routing, order, experts[order], sizes)

    def spread(self, x: jax.Array) -> jax.Array:
        chosen = self.routing.experts.shape[-1]
        pairs = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], chosen, x.shape[-1]))
        return _permuted(pairs.reshape(-1, x.shape[-1]), self.order)

    def product(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, matrices, self.sizes)

    def vectors(self, each: jax.Array) -> jax.Array:
        return each[self.owners]

    def collect(self, rows: jax.Array) -> jax.Array:
        gates = self.routing.gates.astype(rows.dtype)[..., None]
        pairs = _permuted(rows, jnp.argsort(self.order))
        return jnp.sum(pairs.reshape(*gates.shape[:3], -1) * gates, axis=2)


def _permuted(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Says that no row is taken twice, so that the gradient needs no sums."""
    return rows.at[order].get(unique_indices=True)


class Slots(NamedTuple):
    """So many places for each expert in each example: rows are [E, B places, D].

    All tokens' first choices are placed before any second choice, each in the order of the tokens
    (Lepikhin et al. 2021, algorithm 1). What finds no place counts nothing.
    """

    routing: Routing
    slots: jax.Array  # [B, T, C] among the E places of an example; E places if there was none
    places: int  # of each expert
    constrain: Constrain = unconstrained

    @staticmethod
    def of(routing: Routing, capacity: float, constrain: Constrain = unconstrained) -> "Slots":
        """With `capacity` times the places that tokens spread evenly would need."""
        count = routing.probabilities.shape[-1]
        _, length, chosen = routing.experts.shape
        places = max(1, math.ceil(capacity * chosen * length / count))
        asked = jax.nn.one_hot(routing.experts, count, dtype=jnp.int32)  # [B, T, C, E]
        asked = asked * routing.real[..., None, None]
        queue = asked.swapaxes(1, 2).reshape(len(asked), -1, count)
        before = (jnp.cumsum(queue, axis=1) - queue).reshape(len(asked), chosen, length, count)
        rank = jnp.sum(before.swapaxes(1, 2) * asked, axis=-1)  # [B, T, C]
        placed = (rank < places) & routing.real[..., None]
        slots = jnp.where(placed, routing.experts * places + rank, count * places)
        return Slots(routing, slots, places, constrain)

    def spread(self, x: jax.Array) -> jax.Array:
        count, batch = self.routing.probabilities.shape[-1], len(x)

        def place(slots: jax.Array, x: jax.Array) -> jax.Array:  # [T, C], [T, D]
            empty = jnp.zeros((count * self.places, x.shape[-1]), x.dtype)
            return empty.at[slots].set(x[:, None], mode="drop")

        rows = jax.vmap(place)(self.slots, x).reshape(batch, count, self.places, -1)
        rows = self.constrain(rows, AT_TOKENS).swapaxes(0, 1)
        return self.constrain(rows, AT_EXPERTS).reshape(count, batch * self.places, -1)

    def product(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return rows @ matrices

    def vectors(self, each: jax.Array) -> jax.Array:
        return each[:, None]

    def collect(self, rows: jax.Array) -> jax.Array:
        batch = len(self.slots)
        rows = rows.reshape(len(rows), batch, self.places, -1)
        rows = self.constrain(rows, AT_EXPERTS).swapaxes(0, 1)
        rows = self.constrain(rows, AT_TOKENS).reshape(batch, -1, rows.shape[-1])
        take = lambda rows, slots: rows.at[slots].get(mode="fill", fill_value=0)  # noqa: E731
        gates = self.routing.gates.astype(rows.dtype)[..., None]
        return jnp.sum(jax.vmap(take)(rows, self.slots) * gates, axis=2)
