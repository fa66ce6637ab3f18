"""Which experts a token goes to, and the losses that keep the choice healthy.

E experts, of which each token goes to C.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
