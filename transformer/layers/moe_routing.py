"""Router of a mixture of experts, and its auxiliary losses. Each token goes to C of E experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """Experts of every token, and their gates."""

    expert_indices: jax.Array  # [B, T, C] experts of a token, most probable first
    gates: jax.Array  # [B, T, C] float32 weights of the experts' outputs; 0 for padding
    probabilities: jax.Array  # [B, T, E] float32
    token_mask: jax.Array  # [B, T] False for padding


def route_tokens(
    logits: jax.Array,  # [B, T, E] float32
    num_experts_per_token: int,  # C
    *,
    normalize_gates: bool,
    token_mask: jax.Array | None = None,  # [B, T] False for padding; None: no padding
) -> Routing:
    """Send each token to its C most probable experts; of equal ones, to the first.

    Gates are the probabilities (Fedus et al. 2022, section 2.1) or, normalized, the softmax over
    the C selected logits (Shazeer et al. 2017, section 2.1, without noise; Jiang et al. 2024,
    section 2.1).
    """
    token_mask = jnp.ones(logits.shape[:2], bool) if token_mask is None else token_mask
    probabilities = jax.nn.softmax(logits, axis=-1)
    experts = _top_experts(probabilities, num_experts_per_token)
    # Gates carry the router's gradient: the choice of experts itself has none.
    gates = jnp.take_along_axis(probabilities, experts, axis=-1)
    # Probabilities over their sum equal a softmax over the selected logits alone.
    if normalize_gates:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return Routing(experts, jnp.where(token_mask[..., None], gates, 0), probabilities, token_mask)


def _top_experts(probabilities: jax.Array, count: int) -> jax.Array:  # [B, T, E] -> [B, T, C]
    """Return the indices of the C largest probabilities.

    By repeated argmax: the partitioner gathers sharded tokens for `lax.top_k`, which is a sort.
    """
    remaining, found = probabilities, []
    for _ in range(count):
        found.append(jnp.argmax(remaining, axis=-1))
        # -1 is below every probability, so no expert is found twice.
        taken = jax.nn.one_hot(found[-1], remaining.shape[-1], dtype=bool)
        remaining = jnp.where(taken, -1, remaining)
    return jnp.stack(found, axis=-1)


def load_balance_loss(routing: Routing) -> jax.Array:  # scalar
    """Return E sum_e f_e P_e (Fedus et al. 2022, equation 4): 1 if experts are used equally.

    f_e is the fraction of an example's assignments that go to expert e, P_e the mean probability
    of e. The paper takes both over a device's batch; here each example has its own, averaged by
    tokens, so that the loss does not depend on how a batch is split.
    """
    num_experts = routing.probabilities.shape[-1]
    mask = routing.token_mask[..., None].astype(jnp.float32)  # [B, T, 1]
    tokens = jnp.sum(mask, axis=1)  # [B, 1]
    # f_e counts assignments and has no gradient; P_e has one, which is steepest where f_e is high.
    hits = jnp.sum(jax.nn.one_hot(routing.expert_indices, num_experts), axis=2)  # [B, T, E]
    assigned = jnp.sum(hits * mask, axis=1) / routing.expert_indices.shape[-1]
    probability = jnp.sum(routing.probabilities * mask, axis=1)
    # Both sums lack a division by the example's tokens; its weight in the mean cancels one.
    losses = num_experts * jnp.sum(assigned * probability, axis=-1) / jnp.maximum(tokens[:, 0], 1)
    return jnp.sum(losses) / jnp.maximum(jnp.sum(tokens), 1)


def router_z_loss(
    logits: jax.Array,  # [B, T, E] float32
    token_mask: jax.Array,  # [B, T]
) -> jax.Array:  # scalar
    """Return the mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, equation 5)."""
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum(jnp.where(token_mask, squares, 0)) / jnp.maximum(jnp.sum(token_mask), 1)
