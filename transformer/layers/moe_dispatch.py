"""Router of a mixture of experts, dispatch of tokens, and combination of the experts' outputs.

Each token goes to C of E experts.

| dispatcher | tokens | used for |
| --- | --- | --- |
| `DenseDispatcher` | every expert computes every token | CPU, and several devices |
| `SortedDispatcher` | sorted by expert, ragged matmul | a single accelerator |
| `CapacityDispatcher` | fixed slots for each expert; others are dropped | `capacity_factor` |
"""

import math
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from transformer.model_context import ActivationConstraint, unconstrained

RouterScore = Literal["softmax", "sigmoid"]

TINY = 1e-20
"""Added to sums of scores that are divided by: sigmoids may all be zero."""


class Routing(NamedTuple):
    """Experts of every token, and their gates."""

    expert_indices: Int[Array, "B T C"]  # experts of a token, most probable first
    gates: Float32[Array, "B T C"]  # weights of the experts' outputs; 0 for padding
    probabilities: Float32[Array, "B T E"]
    token_mask: Bool[Array, "B T"]  # False for padding

    @property
    def num_experts(self) -> int:
        """E."""
        return self.probabilities.shape[-1]


def route_tokens(
    logits: Float32[Array, "B T E"],
    num_experts_per_token: int,  # C
    *,
    normalize_gates: bool,
    token_mask: Bool[Array, "#B T"] | None = None,  # False for padding; None: no padding
    score: RouterScore = "softmax",
    selection_bias: Float32[Array, "E"] | None = None,  # added for the choice, not to the gates
    num_groups: int = 1,  # of E / num_groups consecutive experts
    num_groups_per_token: int = 1,
) -> Routing:
    """Send each token to its C most probable experts; of equal ones, to the first.

    Gates are the probabilities (Fedus et al. 2022, section 2.1) or, normalized, the softmax over
    the C selected logits (Shazeer et al. 2017, section 2.1, without noise; Jiang et al. 2024,
    section 2.1). With sigmoid scores they are those (DeepSeek-V3, equations 13 to 16).
    """
    # A mask for all rows counts once for each: the losses are means over tokens.
    mask = jnp.bool_(True) if token_mask is None else token_mask
    token_mask = jnp.broadcast_to(mask, logits.shape[:2])
    if score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / (jnp.sum(scores, axis=-1, keepdims=True) + TINY)
    else:
        scores = probabilities = jax.nn.softmax(logits, axis=-1)
    ranking = scores
    if selection_bias is not None:
        ranking = scores + selection_bias[None, None]
    if num_groups_per_token < num_groups:
        shape = (*logits.shape[:2], num_groups, -1)
        # DeepSeek-V2 ranks groups by their best expert, V3, with the bias, by their two best.
        best = 1 if selection_bias is None else 2
        group_scores = _sum_of_largest(ranking.reshape(shape), best)
        groups = _largest(group_scores, num_groups_per_token)
        chosen = jnp.any(jax.nn.one_hot(groups, num_groups, dtype=bool), axis=-2)  # [B, T, groups]
        ranking = jnp.where(chosen[..., None], ranking.reshape(shape), -jnp.inf)
        ranking = ranking.reshape(logits.shape)
    experts = _largest(ranking, num_experts_per_token)
    # Gates carry the router's gradient: the choice of experts itself has none.
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    # Probabilities over their sum equal a softmax over the selected logits alone.
    if normalize_gates:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + TINY)
    return Routing(experts, jnp.where(token_mask[..., None], gates, 0), probabilities, token_mask)


def _largest(scores: Float[Array, "B T E"], count: int) -> Int[Array, "B T C"]:
    """Return the indices of the C largest scores.

    By repeated argmax: the partitioner gathers sharded tokens for `lax.top_k`, which is a sort.
    """
    remaining, indices = scores, []
    for _ in range(count):
        indices.append(jnp.argmax(remaining, axis=-1))
        # Below every score, so no index is found twice.
        taken = jax.nn.one_hot(indices[-1], remaining.shape[-1], dtype=bool)
        remaining = jnp.where(taken, -jnp.inf, remaining)
    return jnp.stack(indices, axis=-1)


def _sum_of_largest(scores: Float[Array, "*tokens E"], count: int) -> Float[Array, "*tokens"]:
    """Return the sum of the largest scores of each group."""
    *tokens, size = scores.shape
    flat = scores.reshape(1, -1, size)
    largest = jnp.take_along_axis(flat, _largest(flat, count), axis=-1)
    return jnp.sum(largest, axis=-1).reshape(tokens)


def load_balance_loss(routing: Routing) -> Float[Array, ""]:
    """Return E sum_e f_e P_e (Fedus et al. 2022, equation 4): 1 if experts are used equally.

    f_e is the fraction of an example's assignments that go to expert e, P_e the mean probability
    of e. The paper takes both over a device's batch; here each example has its own, averaged by
    tokens, so that the loss does not depend on how a batch is split.
    """
    num_experts = routing.num_experts
    mask = routing.token_mask[..., None].astype(jnp.float32)  # [B, T, 1]
    tokens = jnp.sum(mask, axis=1)  # [B, 1]
    # f_e counts assignments and has no gradient; P_e has one, which is steepest where f_e is high.
    hits = jnp.sum(jax.nn.one_hot(routing.expert_indices, num_experts), axis=2)  # [B, T, E]
    assigned = jnp.sum(hits * mask, axis=1) / routing.expert_indices.shape[-1]
    probability = jnp.sum(routing.probabilities * mask, axis=1)
    # Both sums lack a division by the example's tokens; its weight in the mean cancels one.
    losses = num_experts * jnp.sum(assigned * probability, axis=-1) / jnp.maximum(tokens[:, 0], 1)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(tokens), 1)


SELECTION_BIAS_RATE = 0.01
"""Scale of the gradient of the selection bias: it adds little to the norm of all gradients, and the
steps of Adam do not depend on it."""


def selection_bias_loss(bias: Float32[Array, "E"], routing: Routing) -> Float[Array, ""]:
    """Return 0, with a gradient of the bias that balances the experts without changing the loss.

    It is the fraction of assignments beyond the mean of each expert: overloaded experts are chosen
    less after a step. DeepSeek-V3 (section 2.1.2) steps by its sign, as Adam about does.
    """
    mask = routing.token_mask[..., None, None]
    chosen = jax.nn.one_hot(routing.expert_indices, routing.num_experts) * mask  # [B, T, C, E]
    hits = jnp.sum(chosen, axis=(0, 1, 2))
    excess = (hits - jnp.mean(hits)) / jnp.maximum(jnp.sum(hits), 1)
    loss = SELECTION_BIAS_RATE * jnp.sum(bias * excess)
    return loss - jax.lax.stop_gradient(loss)


def router_z_loss(
    logits: Float32[Array, "B T E"],
    token_mask: Bool[Array, "B T"],
) -> Float[Array, ""]:
    """Return the mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, equation 5)."""
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum(jnp.where(token_mask, squares, 0)) / jnp.maximum(jnp.sum(token_mask), 1)


SLOTS_BY_TOKEN = ("batch", None, None, None)
"""Sharding of slots [B, E, slots, D] with the tokens they come from."""

SLOTS_BY_EXPERT = ("experts", "batch", None, None)
"""Sharding of slots [E, B, slots, D] with their experts. Resharding between the two is an
all-to-all."""

TOKEN_AXES = ("batch", "length", None)
"""Sharding of tokens [B, T, D]."""

ROWS_BY_EXPERT = ("experts", "batch", "length", None)
"""Sharding of [E, B, T, D]: with the experts first, then with the tokens over remaining axes."""


class TokenDispatcher(Protocol):
    """Moves tokens to experts and back. Rows are the experts' inputs, in a layout of its own."""

    def dispatch(self, x: Float[Array, "B T D"]) -> jax.Array:
        """Return the rows of the experts, in the dispatcher's layout."""

    def matmul(
        self,
        rows: jax.Array,  # rows of D
        matrices: Float[Array, "E D F"],
    ) -> jax.Array:  # rows of F
        """Multiply each row by the matrix of its expert."""

    def broadcast(self, vectors: Float[Array, "E F"]) -> jax.Array:
        """Return each expert's vector for its rows."""

    def combine(self, rows: jax.Array) -> Float[Array, "B T D"]:
        """Return the sum over a token's experts of gate times row."""


class DenseDispatcher(NamedTuple):
    """Every expert computes every token: rows are [E, B T, D], or [E, B, T, D] if sharded.

    E / C times the necessary work, but dense matmuls of static shapes, and no token is dropped.
    Sharded experts stay where they are. From the constraints of rows and results, XLA lets each
    device gather the tokens of all devices that share the experts (all-gather), compute its experts
    for them, and send their sums back (reduce-scatter, on CPU an all-reduce).
    """

    routing: Routing
    constrain: ActivationConstraint = unconstrained

    @property
    def merges_tokens(self) -> bool:
        """True if each expert has one matrix of all tokens, which on a CPU takes a fifth less time.

        Not if T or the experts are sharded: the merged axis could not be sharded as B and T are.
        """
        return self.constrain.num_shards("length") == self.constrain.num_shards("experts") == 1

    def dispatch(self, x: jax.Array) -> jax.Array:
        if self.merges_tokens:
            x = x.reshape(-1, x.shape[-1])
        rows = jnp.broadcast_to(x[None], (self.routing.num_experts, *x.shape))
        return rows if self.merges_tokens else self.constrain(rows, ROWS_BY_EXPERT)

    def matmul(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        if self.merges_tokens:
            return rows @ matrices
        return jnp.einsum("EBTD,EDF->EBTF", rows, matrices)

    def broadcast(self, vectors: jax.Array) -> jax.Array:
        return vectors[:, None] if self.merges_tokens else vectors[:, None, None]

    def combine(self, rows: jax.Array) -> jax.Array:
        experts, gates = self.routing.expert_indices, self.routing.gates
        # A token's weight is its gate at its own experts and 0 at all others, whose outputs were
        # computed in vain: the price of static shapes without a sort.
        assigned = experts[None] == jnp.arange(len(rows))[:, None, None, None]  # [E, B, T, C]
        weights = jnp.sum(jnp.where(assigned, gates[None], 0), axis=-1).astype(rows.dtype)
        rows = rows.reshape(*weights.shape, -1)
        return self.constrain(jnp.sum(rows * weights[..., None], axis=0), TOKEN_AXES)


class SortedDispatcher(NamedTuple):
    """(token, expert) pairs sorted by expert: rows are [C B T, D], multiplied by `ragged_dot`.

    Computes each pair once and drops none; the result equals that of `DenseDispatcher`.
    """

    routing: Routing
    order: Int[Array, "C_times_B_times_T"]  # index of the pair in each row
    expert_of_row: Int[Array, "C_times_B_times_T"]
    group_sizes: Int[Array, "E"]  # rows of each expert

    @staticmethod
    def from_routing(routing: Routing) -> "SortedDispatcher":
        experts = routing.expert_indices.reshape(-1)
        # Stable: the rows of an expert keep the order of the tokens.
        order = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=routing.num_experts)
        return SortedDispatcher(routing, order, experts[order], sizes)

    def dispatch(self, x: jax.Array) -> jax.Array:
        # A token has one row for each of its C experts, next to each other before the sort.
        chosen = self.routing.expert_indices.shape[-1]
        pairs = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], chosen, x.shape[-1]))
        return _permute(pairs.reshape(-1, x.shape[-1]), self.order)

    def matmul(self, rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, matrices, self.group_sizes)

    def broadcast(self, vectors: jax.Array) -> jax.Array:
        return vectors[self.expert_of_row]

    def combine(self, rows: jax.Array) -> jax.Array:
        # The argsort of a permutation is its inverse: rows return to the order of the pairs.
        gates = self.routing.gates.astype(rows.dtype)[..., None]
        pairs = _permute(rows, jnp.argsort(self.order))
        return jnp.sum(pairs.reshape(*gates.shape[:3], -1) * gates, axis=2)


def _permute(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Return `rows[order]` for a permutation: its gradient needs no scatter-add."""
    return rows.at[order].get(unique_indices=True)


class CapacityDispatcher(NamedTuple):
    """A fixed number of slots for each expert in each example: rows are [E, B slots, D].

    The first choices of all tokens are placed before any second choice, each in token order
    (Lepikhin et al. 2021, algorithm 1). A token that finds no slot is dropped: its output is 0.
    """

    routing: Routing
    slots: Int[Array, "B T C"]  # slot in 0 to E slots_per_expert - 1; one more if dropped
    slots_per_expert: int
    constrain: ActivationConstraint = unconstrained

    @staticmethod
    def from_routing(
        routing: Routing, capacity_factor: float, constrain: ActivationConstraint = unconstrained
    ) -> "CapacityDispatcher":
        """Assign slots: `capacity_factor` times as many as evenly spread tokens would need."""
        num_experts = routing.num_experts
        batch_size, length, per_token = routing.expert_indices.shape
        slots_per_expert = max(1, math.ceil(capacity_factor * per_token * length / num_experts))
        # Capacity is counted within each example, so that its result does not depend on the others
        # in the batch, nor on how the batch is split over devices.
        chosen = jax.nn.one_hot(routing.expert_indices, num_experts, dtype=jnp.int32)
        chosen = chosen * routing.token_mask[..., None, None]  # [B, T, C, E]
        # Number of requests for the same expert before each one: an exclusive cumulative sum over
        # (choice, token), so that all first choices come before second choices.
        queue = chosen.swapaxes(1, 2).reshape(batch_size, -1, num_experts)
        before = jnp.cumsum(queue, axis=1) - queue
        before = before.reshape(batch_size, per_token, length, num_experts).swapaxes(1, 2)
        rank = jnp.sum(before * chosen, axis=-1)  # [B, T, C]
        placed = (rank < slots_per_expert) & routing.token_mask[..., None]
        slots = jnp.where(
            placed,
            routing.expert_indices * slots_per_expert + rank,
            num_experts * slots_per_expert,  # out of range: dropped by `dispatch`
        )
        return CapacityDispatcher(routing, slots, slots_per_expert, constrain)

    def dispatch(self, x: jax.Array) -> jax.Array:
        num_experts, batch = self.routing.num_experts, x.shape[0]

        def place(slots: Int[Array, "T C"], x: Float[Array, "T D"]) -> jax.Array:  # [T, C], [T, D]
            # Two tokens never share a slot, so the order of the writes does not matter.
            empty = jnp.zeros((num_experts * self.slots_per_expert, x.shape[-1]), x.dtype)
            return empty.at[slots].set(x[:, None], mode="drop")

        rows = jax.vmap(place)(self.slots, x).reshape(batch, num_experts, self.slots_per_expert, -1)
        # Constrained on both sides of the swap, so that the partitioner exchanges slots by an
        # all-to-all where they change hands, and nowhere else.
        rows = self.constrain(rows, SLOTS_BY_TOKEN).swapaxes(0, 1)
        return self.constrain(rows, SLOTS_BY_EXPERT).reshape(
            num_experts, batch * self.slots_per_expert, -1
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
        # Dropped tokens point out of range and read 0.
        take = lambda rows, slots: rows.at[slots].get(mode="fill", fill_value=0)  # noqa: E731
        gates = self.routing.gates.astype(rows.dtype)[..., None]
        return jnp.sum(jax.vmap(take)(rows, self.slots) * gates, axis=2)
