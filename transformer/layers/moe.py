"""Mixture of experts: many feed-forwards, of which each token goes through a few."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.base import NO_OUTPUTS, Outputs
from transformer.context import ModelContext
from transformer.layers.config import MoEConfig
from transformer.layers.dropout import dropout
from transformer.layers.feedforward import ACTIVATIONS, FeedForwardOutput, declare_swish
from transformer.layers.moe_dispatch import (
    AllGatherDispatcher,
    CapacityDispatcher,
    DenseDispatcher,
    Routing,
    SortedDispatcher,
    TokenDispatcher,
    experts_are_sharded,
    load_balance_loss,
    route_tokens,
    router_z_loss,
)
from transformer.layers.params import apply_matrix, declare_weight


class MixtureOfExperts(nn.Module):
    """The sum over a token's C experts of gate * expert(x)."""

    config: MoEConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        dropout_rngs: jax.Array | None = None,  # [B]
        *,
        token_mask: jax.Array | None = None,  # [B, T] False for padding, which gets zeros
        outputs: Outputs = NO_OUTPUTS,
    ) -> FeedForwardOutput:
        """`aux` has the two losses times their coefficients, if `losses` are requested."""
        config = self.config
        logits = self.router_logits(x)
        routing = route_tokens(
            logits,
            config.num_experts_per_token,
            normalize_gates=config.normalize_gates,
            token_mask=token_mask,
        )
        y = self.apply_experts(choose_dispatcher(config, routing, self.context), x, dropout_rngs)
        if "losses" not in outputs:
            return FeedForwardOutput(y, {})
        losses = {
            "loss/load_balance": config.load_balance_loss_weight * load_balance_loss(routing),
            "loss/router_z": config.router_z_loss_weight
            * router_z_loss(logits, routing.token_mask),
        }
        return FeedForwardOutput(y, losses)

    def router_logits(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, E]
        """In float32 whatever the policy: a rounded probability sends tokens astray."""
        shared, inputs = self.context, {"embed": self.context.d_model}
        matrix = declare_weight(
            self,
            "router",
            inputs=inputs,
            outputs={"routes": self.config.num_experts},
            init=shared.initialization.matrix_initializer(inputs),
            dtype=shared.precision.parameters,
        )
        matrix = shared.constrain(matrix, (None, None))  # small: whole on each device
        wide = x.astype(jnp.float32)
        logits = apply_matrix(wide, matrix.astype(wide.dtype), 1, shared.flatten_tokens)
        return shared.constrain(logits, ("batch", "length", None))

    def apply_experts(
        self,
        dispatcher: TokenDispatcher,
        x: jax.Array,  # [B, T, D]
        dropout_rngs: jax.Array | None,  # [B]
    ) -> jax.Array:  # [B, T, D]
        """What `FeedForward` does, with the weights of each row's expert."""
        config, shared = self.config.expert, self.context
        embed, mlp = {"embed": shared.d_model}, {"mlp": config.resolved_d_ff(shared.d_model)}
        activation = ACTIVATIONS.get(config.activation) or declare_swish(self, config, shared)
        rows = dispatcher.dispatch(x)
        hidden = self.expert_linear(dispatcher, "up", rows, embed, mlp)
        if config.gated:
            hidden = activation(self.expert_linear(dispatcher, "gate", rows, embed, mlp)) * hidden
        else:
            hidden = activation(hidden)
        if dropout_rngs is not None and config.dropout:
            ones = jnp.ones((*x.shape[:2], *mlp.values()), x.dtype)
            hidden = hidden * dispatcher.dispatch(dropout(ones, config.dropout, dropout_rngs))
        return dispatcher.combine(self.expert_linear(dispatcher, "down", hidden, mlp, embed))

    def expert_linear(
        self,
        dispatcher: TokenDispatcher,
        name: str,
        rows: jax.Array,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
    ) -> jax.Array:
        """Declares the experts' matrices `name` (and `name_bias`) and applies them."""
        shared, stack = self.context, {"experts": self.config.num_experts}
        dtype, start = shared.precision.parameters, shared.initialization
        init = start.matrix_initializer(
            inputs, num_residual_layers=shared.num_layers if name == "down" else 0
        )
        matrices = declare_weight(
            self, name, stack=stack, inputs=inputs, outputs=outputs, init=init, dtype=dtype
        )
        rows = dispatcher.matmul(rows, matrices.astype(rows.dtype))
        if not self.config.expert.bias:
            return rows
        zeros = nn.initializers.zeros
        bias = declare_weight(
            self, f"{name}_bias", stack=stack, outputs=outputs, init=zeros, dtype=dtype
        )
        return rows + dispatcher.broadcast(bias.astype(rows.dtype))


def choose_dispatcher(
    config: MoEConfig, routing: Routing, context: ModelContext
) -> TokenDispatcher:
    """How tokens reach their experts.

    XLA's CPU compiler makes a ragged product from E dense ones. On several devices a sort would
    bring all tokens to each.
    """
    if config.capacity_factor:
        return CapacityDispatcher.from_routing(routing, config.capacity_factor, context.constrain)
    hardware = context.hardware
    alone = hardware.platform != "cpu" and hardware.count == 1
    if config.dispatcher == "sorted" or (config.dispatcher == "auto" and alone):
        return SortedDispatcher.from_routing(routing)
    if experts_are_sharded(routing, context.constrain):
        return AllGatherDispatcher(routing, context.constrain)
    return DenseDispatcher(routing, context.constrain)
