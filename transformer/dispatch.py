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
from transformer.shared import ActivationConstraint, unconstrained

SLOTS_BY_TOKEN = ("batch", None, None, None)
SLOTS_BY_EXPERT = ("experts", "batch", None, None)
"""Where slots lie [B, E, places, D] or [E, B, places, D]: with their tokens, or with their experts.
From one to the other, each device sends to each other what is its."""


class TokenDispatcher(Protocol):
    """Rows are tokens as the experts see them, each kind in its own arrangement."""

    def dispatch(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> rows of D
        """The experts' inputs."""

    def matmul(
        self,
        rows: jax.Array,  # rows of D
        matrices: jax.Array,  # [E, D, F]
    ) -> jax.Array:  # rows of F
        """Each row times the matrix of its expert."""

    def broadcast(self, vectors: jax.Array) -> jax.Array:  # [E, F] -> rows of F, or like them
        """A vector of each expert, for its rows."""

    def combine(self, rows: jax.Array) -> jax.Array:  # rows of D -> [B, T, D]
        """The results of each token's experts, times their gates, summed."""


class DenseDispatcher(NamedTuple):
    """All tokens for each expert: rows are [E, B T, D], or [E, B, T, D] if T is spread."""

    routing: Routing
    constrain: ActivationConstraint = unconstrained

    def dispatch(self, x: jax.Array) -> jax.Array:
        count = self.routing.probabilities.shape[-1]
        x = x if self.constrain.num_shards("length") > 1 else x.reshape(-1, x.shape[-1])
        return jnp.broadcast_to(x[None], (count, *x.shape))

    def matmul(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        if rows.ndim == 4:  # both axes of tokens are split over devices
            return jnp.einsum("EBTD,EDF->EBTF", rows, matrices)
        return rows @ matrices

    def broadcast(self, vectors: jax.Array) -> jax.Array:
        return (
            vectors[:, None] if self.constrain.num_shards("length") == 1 else vectors[:, None, None]
        )

    def combine(self, rows: jax.Array) -> jax.Array:
        experts, gates = self.routing.expert_indices, self.routing.gates
        asked = experts[None] == jnp.arange(len(rows))[:, None, None, None]  # [E, B, T, C]
        weights = jnp.sum(jnp.where(asked, gates[None], 0), axis=-1).astype(rows.dtype)
        rows = rows.reshape(*weights.shape, -1)
        return jnp.sum(rows * weights[..., None], axis=0)


class SortedDispatcher(NamedTuple):
    """The C B T pairs of a token and an expert in the experts' order: rows are [C B T, D]."""

    routing: Routing
    order: jax.Array  # [C B T] the pair that stands at each row
    expert_of_row: jax.Array  # [C B T] the expert of each row
    group_sizes: jax.Array  # [E] rows of each expert

    @staticmethod
    def from_routing(routing: Routing) -> "SortedDispatcher":
        experts = routing.expert_indices.reshape(-1)
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=routing.probabilities.shape[-1])
        return SortedDispatcher(routing, order, experts[order], sizes)

    def dispatch(self, x: jax.Array) -> jax.Array:
        chosen = self.routing.expert_indices.shape[-1]
        pairs = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], chosen, x.shape[-1]))
        return _permuted(pairs.reshape(-1, x.shape[-1]), self.order)

    def matmul(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, matrices, self.group_sizes)

    def broadcast(self, vectors: jax.Array) -> jax.Array:
        return vectors[self.expert_of_row]

    def combine(self, rows: jax.Array) -> jax.Array:
        gates = self.routing.gates.astype(rows.dtype)[..., None]
        pairs = _permuted(rows, jnp.argsort(self.order))
        return jnp.sum(pairs.reshape(*gates.shape[:3], -1) * gates, axis=2)


def _permuted(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Says that no row is taken twice, so that the gradient needs no sums."""
    return rows.at[order].get(unique_indices=True)


class CapacityDispatcher(NamedTuple):
    """So many places for each expert in each example: rows are [E, B places, D].

    All tokens' first choices are placed before any second choice, each in the order of the tokens
    (Lepikhin et al. 2021, algorithm 1). What finds no place counts nothing.
    """

    routing: Routing
    slots: jax.Array  # [B, T, C] among the E places of an example; E places if there was none
    slots_per_expert: int  # of each expert
    constrain: ActivationConstraint = unconstrained

    @staticmethod
    def from_routing(
        routing: Routing, capacity_factor: float, constrain: ActivationConstraint = unconstrained
    ) -> "CapacityDispatcher":
        """With `capacity_factor` times the places that tokens spread evenly would need."""
        count = routing.probabilities.shape[-1]
        _, length, chosen = routing.expert_indices.shape
        places = max(1, math.ceil(capacity_factor * chosen * length / count))
        asked = jax.nn.one_hot(routing.expert_indices, count, dtype=jnp.int32)  # [B, T, C, E]
        asked = asked * routing.token_mask[..., None, None]
        queue = asked.swapaxes(1, 2).reshape(len(asked), -1, count)
        before = (jnp.cumsum(queue, axis=1) - queue).reshape(len(asked), chosen, length, count)
        rank = jnp.sum(before.swapaxes(1, 2) * asked, axis=-1)  # [B, T, C]
        placed = (rank < places) & routing.token_mask[..., None]
        slots = jnp.where(placed, routing.expert_indices * places + rank, count * places)
        return CapacityDispatcher(routing, slots, places, constrain)

    def dispatch(self, x: jax.Array) -> jax.Array:
        count, batch = self.routing.probabilities.shape[-1], len(x)

        def place(slots: jax.Array, x: jax.Array) -> jax.Array:  # [T, C], [T, D]
            empty = jnp.zeros((count * self.slots_per_expert, x.shape[-1]), x.dtype)
            return empty.at[slots].set(x[:, None], mode="drop")

        rows = jax.vmap(place)(self.slots, x).reshape(batch, count, self.slots_per_expert, -1)
        rows = self.constrain(rows, SLOTS_BY_TOKEN).swapaxes(0, 1)
        return self.constrain(rows, SLOTS_BY_EXPERT).reshape(
            count, batch * self.slots_per_expert, -1
        )

    def matmul(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return rows @ matrices

    def broadcast(self, vectors: jax.Array) -> jax.Array:
        return vectors[:, None]

    def combine(self, rows: jax.Array) -> jax.Array:
        batch = len(self.slots)
        rows = rows.reshape(len(rows), batch, self.slots_per_expert, -1)
        rows = self.constrain(rows, SLOTS_BY_EXPERT).swapaxes(0, 1)
        rows = self.constrain(rows, SLOTS_BY_TOKEN).reshape(batch, -1, rows.shape[-1])
        take = lambda rows, slots: rows.at[slots].get(mode="fill", fill_value=0)  # noqa: E731
        gates = self.routing.gates.astype(rows.dtype)[..., None]
        return jnp.sum(jax.vmap(take)(rows, self.slots) * gates, axis=2)
