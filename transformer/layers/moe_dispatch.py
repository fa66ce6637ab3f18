"""Which experts a token goes to, and the losses that keep the choice healthy.

E experts, of which each token goes to C.

How tokens reach their experts and come back.

`Dense` has every expert look at every token: E / C times the work, and the fastest where ragged
products are slow or tokens are spread over devices. `Sorted` puts tokens in the order of their
experts and computes none in vain; it gives the same numbers. `Slots` gives each expert so many
places in each example, and a token that finds none left is dropped.

Experts on several devices: each gets the tokens of all devices that share the experts.

No token is dropped, so nobody knows beforehand how many go where: all are gathered, and each device
adds up what its experts make of them. The sums go back to where the tokens came from
(`reduce-scatter`). With a capacity the numbers are known, and tokens go to their experts alone: see
`Slots` of `dispatch.py`.
"""

import math
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from transformer.context import ActivationConstraint, unconstrained


class Routing(NamedTuple):
    """The experts of every token, and what their results count."""

    expert_indices: jax.Array  # [B, T, C] numbers of experts, the likeliest first
    gates: jax.Array  # [B, T, C] float32; 0 for padding
    probabilities: jax.Array  # [B, T, E] float32
    token_mask: jax.Array  # [B, T] booleans: no padding


def route_tokens(
    logits: jax.Array,  # [B, T, E] float32
    num_experts_per_token: int,  # C
    *,
    normalize_gates: bool,
    token_mask: jax.Array | None = None,  # [B, T] booleans; None: there is no padding
) -> Routing:
    """The C likeliest experts; of two that are alike, the first.

    Their gates are their probabilities (Fedus et al. 2022, section 2.1), or these divided by their
    sum: the softmax over the C chosen logits (Shazeer et al. 2017, section 2.1, without the noise;
    Jiang et al. 2024, section 2.1).
    """
    token_mask = jnp.ones(logits.shape[:2], bool) if token_mask is None else token_mask
    probabilities = jax.nn.softmax(logits, axis=-1)
    experts = _likeliest(probabilities, num_experts_per_token)
    gates = jnp.take_along_axis(probabilities, experts, axis=-1)
    if normalize_gates:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return Routing(experts, jnp.where(token_mask[..., None], gates, 0), probabilities, token_mask)


def _likeliest(probabilities: jax.Array, chosen: int) -> jax.Array:  # [B, T, E] -> [B, T, C]
    """The places of the C largest. `top_k` would gather tokens that are spread over devices."""
    left, found = probabilities, []
    for _ in range(chosen):
        found.append(jnp.argmax(left, axis=-1))
        taken = jax.nn.one_hot(found[-1], left.shape[-1], dtype=bool)
        left = jnp.where(taken, -1, left)
    return jnp.stack(found, axis=-1)


def load_balance_loss(routing: Routing) -> jax.Array:  # a number
    """E sum over experts of f_e P_e (Fedus et al. 2022, equation 4): 1 when all are used alike.

    f_e is the share of an example's choices that fall on expert e, P_e the mean of its probability.
    The paper takes both over a device's batch; here each example has its own, and the result is
    their mean by tokens, so that it does not depend on how a batch is cut.
    """
    count = routing.probabilities.shape[-1]
    real = routing.token_mask[..., None].astype(jnp.float32)  # [B, T, 1]
    tokens = jnp.sum(real, axis=1)  # [B, 1]
    hits = jnp.sum(jax.nn.one_hot(routing.expert_indices, count), axis=2)  # [B, T, E]
    choices = jnp.sum(hits * real, axis=1) / routing.expert_indices.shape[-1]
    probability = jnp.sum(routing.probabilities * real, axis=1)
    each = count * jnp.sum(choices * probability, axis=-1) / jnp.maximum(tokens[:, 0], 1)
    return jnp.sum(each) / jnp.maximum(jnp.sum(tokens), 1)


def router_z_loss(
    logits: jax.Array,  # [B, T, E] float32
    token_mask: jax.Array,  # [B, T] booleans
) -> jax.Array:  # a number
    """The mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, equation 5)."""
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum(jnp.where(token_mask, squares, 0)) / jnp.maximum(jnp.sum(token_mask), 1)


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
