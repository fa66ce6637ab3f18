"""Mixture of experts: many feed-forwards, of which each token goes through a few."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.dispatch import Dense, Dispatch, Slots, Sorted
from transformer.dropout import dropout
from transformer.feedforward import FeedForwardOutput, nonlinearity
from transformer.gathered import Gathered, spreads_experts
from transformer.layer_configs import Form as Form
from transformer.layer_configs import MixtureConfig as MixtureConfig
from transformer.linear import apply_matrix
from transformer.mixers import NO_OUTPUTS, Outputs
from transformer.routing import Routing, load_balance, route, router_z
from transformer.shared import Shared
from transformer.weights import weight


class Mixture(nn.Module):
    """The sum over a token's C experts of gate * expert(x)."""

    config: MixtureConfig
    shared: Shared

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        dropout_rngs: jax.Array | None = None,  # [B]
        *,
        real: jax.Array | None = None,  # [B, T] booleans; others are padding and get zeros
        outputs: Outputs = NO_OUTPUTS,
    ) -> FeedForwardOutput:
        """`aux` has the two losses times their coefficients, if `losses` are requested."""
        config = self.config
        logits = self.router(x)
        routing = route(logits, config.chosen, renormalise=config.renormalise, real=real)
        y = self.experts(dispatch(config, routing, self.shared), x, dropout_rngs)
        if "losses" not in outputs:
            return FeedForwardOutput(y, {})
        losses = {
            "loss/load_balance": config.load_balance * load_balance(routing),
            "loss/router_z": config.router_z * router_z(logits, routing.real),
        }
        return FeedForwardOutput(y, losses)

    def router(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, E]
        """In float32 whatever the policy: a rounded probability sends tokens astray."""
        shared, inputs = self.shared, {"embed": self.shared.width}
        matrix = weight(
            self,
            "router",
            inputs=inputs,
            outputs={"routes": self.config.experts},
            init=shared.initialization.matrix(inputs),
            dtype=shared.precision.parameters,
        )
        matrix = shared.constrain(matrix, (None, None))  # small: whole on each device
        wide = x.astype(jnp.float32)
        logits = apply_matrix(wide, matrix.astype(wide.dtype), 1, shared.flattens_tokens)
        return shared.constrain(logits, ("batch", "length", None))

    def experts(
        self,
        groups: Dispatch,
        x: jax.Array,  # [B, T, D]
        dropout_rngs: jax.Array | None,  # [B]
    ) -> jax.Array:  # [B, T, D]
        """What `FeedForward` does, with the weights of each row's expert."""
        config, shared = self.config.expert, self.shared
        embed, mlp = {"embed": shared.width}, {"mlp": config.hidden_width(shared.width)}
        activation = nonlinearity(self, config, shared)
        rows = groups.spread(x)
        hidden = self.linear(groups, "up", rows, embed, mlp)
        if config.gated:
            hidden = activation(self.linear(groups, "gate", rows, embed, mlp)) * hidden
        else:
            hidden = activation(hidden)
        if dropout_rngs is not None and config.dropout:
            ones = jnp.ones((*x.shape[:2], *mlp.values()), x.dtype)
            hidden = hidden * groups.spread(dropout(ones, config.dropout, dropout_rngs))
        return groups.collect(self.linear(groups, "down", hidden, mlp, embed))

    def linear(
        self,
        groups: Dispatch,
        name: str,
        rows: jax.Array,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
    ) -> jax.Array:
        """Declares the experts' matrices `name` (and `name_bias`) and applies them."""
        shared, stack = self.shared, {"experts": self.config.experts}
        dtype, start = shared.precision.parameters, shared.initialization
        init = start.matrix(inputs, residual_layers=shared.layers if name == "down" else 0)
        matrices = weight(
            self, name, stack=stack, inputs=inputs, outputs=outputs, init=init, dtype=dtype
        )
        rows = groups.product(rows, matrices.astype(rows.dtype))
        if not self.config.expert.bias:
            return rows
        zeros = nn.initializers.zeros
        bias = weight(self, f"{name}_bias", stack=stack, outputs=outputs, init=zeros, dtype=dtype)
        return rows + groups.vectors(bias.astype(rows.dtype))


def dispatch(config: MixtureConfig, routing: Routing, shared: Shared) -> Dispatch:
    """How tokens reach their experts.

    XLA's CPU compiler makes a ragged product from E dense ones. On several devices a sort would
    bring all tokens to each.
    """
    if config.capacity:
        return Slots.of(routing, config.capacity, shared.constrain)
    hardware = shared.hardware
    alone = hardware.platform != "cpu" and hardware.count == 1
    if config.form == "sorted" or (config.form == "auto" and alone):
        return Sorted.of(routing)
    if spreads_experts(routing, shared.constrain):
        return Gathered(routing, shared.constrain)
    return Dense(routing, shared.constrain)
